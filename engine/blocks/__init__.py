"""Which blocks and states are whose, and which can be shared?

In reading order: `block_table` (the KV blocks of a request), `block_pool` (all KV blocks) and `state_slots` (the states
of linear layers).
"""
