"""Verification: which draft tokens are committed.

In reading order: `rule` (what a rule needs and decides, and every rule by name), `verifier` (the target's pass),
`coupled` (shared noise; the default), `rejection` (Leviathan et al.), `block` and `k_sequential` (Sun et al.), and
`draft_rows`, which the last three share.
"""
