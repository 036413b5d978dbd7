"""How is each operator written, so that its rounding does not depend on the batch?

`product` sums the inner dimension in one order, `grouped_product` does the same for the experts of a mixture,
`triton_attention` splits a context in one way, `cache_write` fills the cache, and `draw_kernel` draws tokens.
"""
