"""How does a draft model draft before the verdict is known?

In reading order: `passes` (how many fit before the next request, and launching them), `branches` (drafts for the
likeliest verdicts), `chains`, and `trees`, which keep growing after they were sent.
"""
