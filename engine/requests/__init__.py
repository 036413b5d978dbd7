"""Which requests are served, in which order, and what has each of them got?

In reading order: `limits` (which requests a model can serve), `output` (what a round adds to a request), `sequence` (a
request's committed tokens and blocks), `detokenizer` (token ids to text) and `waiting` (which request starts next, and
which is preempted).
"""
