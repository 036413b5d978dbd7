"""Training models: `python -m engine.training pretrain|distill|evaluate|choose-layers`.

In reading order: `loop` (the training loop), `corpus` (text to batches), `pretrain` and `distill` (the two objectives),
`acceptance` (the acceptance rate of a pair), `speedup` and `cost` (what it gains), `evaluate` (the report);
`self_speculation` (what a target gains that drafts for itself) and `choose_layers` (the search for the sub-layers that
it skips). Beside them `models` (building and loading), `tokenizer`, `optimizer`, `checkpoint` and `errors`.
"""
