"""How is a draft made, and is it worth it? `python -m engine.training pretrain|distill|head|evaluate`.

In reading order: `corpus` (text to batches), `small_model` (models and their tokenizer), `checkpoint` (writing and
resuming), `loop` (the training loop and its optimizers), `pretrain` and `distill` (the two objectives), `new_head` and
`head_training` (trained heads), `measured_acceptance` (the acceptance of a pair), `comparison` (everything that can
draft, as it is served) and `evaluate` (the report of `paceline evaluate`, too). No server imports this folder.
"""
