"""Drafting methods: who proposes draft tokens.

In reading order: `registry` (every method by name, and where it runs), `check` (whether a draft is one), `copying/`
(text that occurred before, without a model), `chain` (draft tokens as they are drawn), `token_drawer` (how they are
drawn from a model's passes), `cached_prefix` (what a drafter holds of a text), `model` (a draft model), `self_draft`
(the target itself), `skip_list` (the sub-layers that it skips, as users write them), `nodes` (a tree as it grows),
`best_first` (its likeliest nodes), `tree` (a draft model that drafts trees), `sampled_tree` (trees for rules that need
draft rows) and `run_ahead/` (drafting for the likeliest verdicts while the target verifies).
"""
