"""The Router deployment: each replica runs the engine over its own speculation group.

In reading order: `generation` (what an Ingress requests), `router` (the deployment), `round_loop` (runs the engine's
rounds) and `stream` (delivers a request's tokens).
"""
