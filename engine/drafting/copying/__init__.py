"""How is earlier text proposed again, without a model?

In reading order: `ngram` (the request's own text, latest match first), `suffix` (the request's text and earlier
outputs, by frequency) and `combined` (copies where they promise more than a model's chain).
"""
