"""Training of draft models: `python -m engine.training pretrain|distill|evaluate`.

In reading order: `loop` (the training loop), `corpus` (text to batches), `pretrain` and `distill` (the two objectives),
`acceptance` (the acceptance rate of a pair), `speedup` and `cost` (what it gains), `evaluate` (the report). Beside them
`models` (building and loading), `tokenizer`, `optimizer`, `checkpoint` and `errors`.
"""
