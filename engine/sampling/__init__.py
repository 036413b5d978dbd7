"""Which token do these logits give?

In reading order: `logits` (applies the sampling parameters and draws), `top_tokens` (top_k and top_p), `row_shaping`
(the parameters as tensors), `noise` (the random numbers that draft and target share), `grammar` (which tokens may come
next) and `grammar_text` (what grammars are made of).
"""
