"""Distributed speculative decoding: Ray actors, placement, transport and tensor parallelism; no HTTP.

In reading order: `config`, `protocol/`, `transport/`, `remote_drafter`, `remote_verifier`, `round_times`, `workers/`,
`leases`, `placement`, `capacity`, `worker_set`, `memory_plan`, `ray_core` and `group`, which puts them together.
"""
