"""Which requests are served, which one starts next, and what has each of them got?

In reading order: `limits` (which requests a model can serve), `sequence` (a request's committed tokens and blocks),
`detokenizer` (token ids to text) and `waiting` (who starts next, and who makes room).
"""
