"""What makes speculative decoding distributed: Ray actors, placement, the wire, tensor parallelism. No HTTP.

In reading order: `messages` (what travels), `prefix_table` (what a worker remembers of it), `channel` (how it travels),
`responder` (a request in, a reply out), `remote` (the engine's two protocols over a channel), `workers` (the Ray
actors), `tensor_parallel`, `placement`, and `group`, which puts them together.
"""
