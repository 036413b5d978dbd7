"""How does a draft model draft before the verdict is known?

In reading order: `passes` (how many fit before the next request, and launching them), `branches` (drafts for the
likeliest verdicts), `chains`, and `shared_pass` (the passes of several drafters as one).
"""
