"""Which draft tokens are accepted?

In reading order: `rule` (every rule by name, and their interface), `verifier` (the target's pass), `decider`
(verdicts from its logits), `coupled` (shared noise; the default), `rejection` (Leviathan et al.), `block` and
`k_sequential` (Sun et al.), and `draft_rows`, which the last three share.
"""
