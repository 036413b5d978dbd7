"""Distributed speculative decoding: Ray actors, placement, transport and tensor parallelism; no HTTP.

In reading order: `config` (the settings of a group), `protocol/` (messages), `transport/` (sends them),
`remote_drafter` and `remote_verifier` (the engine's two roles over links), `round_times` (how long rounds take and may
take), `workers/` (the processes that compute), `leases` (a group's use of a draft worker, its own or a shared one),
`placement` (the resources requested from Ray), `capacity` (how many groups fit), `worker_set` (starting and
stopping workers), `memory_plan` (their KV blocks), `ray_core` (Ray's private parts) and `group`, which puts them
together.
"""
