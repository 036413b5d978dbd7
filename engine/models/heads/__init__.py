"""How does a trained head draft from a target's layers?

In reading order: `config` (what a head's files say), `head_weights` (loads it).
"""
