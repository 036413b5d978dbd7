"""The tool that makes better drafts: `python -m engine.training pretrain|distill|evaluate`.

In reading order: `loop` (the training loop, a page), `corpus` (text to batches), `pretrain` and `distill` (what is
learned), `acceptance` (how many draft tokens a target keeps), `speedup` and `cost` (what they are worth), `evaluate`
(the report); beside them `models`, `tokenizer`, `optimizer` and `checkpoint`.
"""
