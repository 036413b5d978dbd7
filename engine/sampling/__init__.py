"""From logits to a token.

In reading order: `params` (what a client may set), `logits` (applies it and draws), `noise` (the random numbers that
draft and target share) and `grammar` (which tokens may come next).
"""
