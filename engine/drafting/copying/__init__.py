"""How is earlier text proposed again, without a model?

In reading order: `ngram` (the request's own text, latest match first), `suffix` (the request's text and earlier
outputs, by frequency), `combined` (copies where they promise more than another drafter) and `predicted` (the output
that a client predicts).
"""
