"""How many draft tokens, for whom?

In reading order: `plan` (the draft lengths of a round), `goodput` (the one with the most tokens per second),
`acceptance` (how often draft tokens are accepted, learned from verdicts) and `stats` (counters of drafts and requests).
"""
