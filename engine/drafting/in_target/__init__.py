"""How is a draft made in the target's process?

In reading order: `target_chains` and `target_trees`.
"""
