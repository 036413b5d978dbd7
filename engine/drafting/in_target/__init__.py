"""How is a draft made in the target's process?

Only `target_chains`.
"""
