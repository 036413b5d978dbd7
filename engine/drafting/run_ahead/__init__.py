"""How does a draft model draft before the verdict is known?

In reading order: `passes` (how many fit before the next request), `branches` (drafts for the likeliest verdicts),
`chains`, and `shared_pass` (several drafters' passes together).
"""
