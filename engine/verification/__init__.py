"""Verification: which draft tokens are committed.

In reading order: `rule` (what a rule needs and decides, and every rule by name), `verifier` (the target's pass),
`coupled` (shared noise; the default) and `rejection` (Leviathan et al.).
"""
