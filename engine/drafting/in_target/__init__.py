"""How does the target draft for itself?

Only `self_draft`.
"""
