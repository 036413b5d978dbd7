"""What makes speculative decoding distributed: Ray actors, placement, transport, tensor parallelism. No HTTP.

In reading order: `config` (what a group is made of), `protocol/` (messages), `transport/` (how they travel), `remote`
(the engine's two protocols over links), `workers/` (the Ray actors), `placement` (what Ray is asked for), `worker_set`
(starting and stopping workers), and `group`, which puts them together.
"""
