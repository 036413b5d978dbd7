"""Which blocks are whose, which can be shared, and what else does a kind of cache give to requests?

In reading order: `block_pool` (the KV blocks) and `row_extras` (what other kinds of caches add to a row).
"""
