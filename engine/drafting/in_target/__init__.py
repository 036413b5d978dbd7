"""How is a draft made in the target's process?

`target_chains` (a token a pass), `block_drafter` (several tokens a pass).
"""
