"""How is a trained head made for a target?

In reading order: `dense_context` (attention over whole texts, in place of a KV cache), `unroll` (the logits of drafts
that start at many places at once, and their acceptance), `new_head` (a head to start from, and its files) and
`train_head` (the losses and the run).
"""
