"""How does an encoder's output get into the cache of a decoder?

In reading order: `model_kind` (which models, and what they refuse), `t5` (models over a paged cache), `inputs` (what an
input adds to passes) and `input_rows` (how inputs are scheduled).
"""
