"""Who proposes draft tokens?

In reading order: `registry` (every method by name, and where it runs), `settle` (the method and the models of a pair's
settings), `assembly` (loads the pair), `check` (whether a draft is valid), `model/` (a draft model drafts chains),
`learning/` (it learns from the texts that it drafts for), `run_ahead/` (it drafts for the likeliest verdicts while the
target verifies), `copying/` (text that occurred before is proposed again), `in_target/` (the target drafts for itself)
and `trees/` (any of these drafts alternatives, too).
"""
