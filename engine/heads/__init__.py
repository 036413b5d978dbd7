"""How does a trained head draft from a target's layers?

In reading order: `config` (what a head's files say), `head` (the base class, and what it caches), `tapped` (the target
that feeds it), `registry` (every kind by name), `head_weights` (loads a head), the kinds `eagle3`, `peagle`, `dflash`,
`mtp`, and `dense_context` and `unrolling` (a head over whole texts, for training and learning).
"""
