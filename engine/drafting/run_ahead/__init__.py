"""Drafting for the likeliest verdicts while the target verifies.

In reading order: `verdicts` (how likely each verdict is), `foresight` (which verdicts to draft for), `branches` (their
drafts as they grow), `pace` (how many passes fit before the next request), `passes` (how they are launched), `drafter`,
which puts them together, and `trees`, where a tree that was sent grows on.
"""
