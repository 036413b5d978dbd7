"""The messages between the Router and its workers.

In reading order: `messages` (requests and replies as msgpack), `prefix_delta` (sending only the tokens that a worker
lacks) and `validation` (checking replies before they reach the engine).
"""
