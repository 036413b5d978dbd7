"""Drafting without a model: text that occurred before is proposed again.

In reading order: `token_index` (where a text's n-grams occurred), `ngram` (the request's own text, latest match first),
`suffix` (the request's text and earlier outputs, by frequency), which measures its drafts with `track_record`, and
`combined` (copies where they promise more than a model's chain).
"""
