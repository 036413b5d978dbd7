"""Who proposes, in reading order.

registry (every method by name, and where it runs), chain (draft tokens as they are drawn), model (a draft model),
run_ahead/ (drafting for the likeliest verdicts while the target verifies).
"""
