"""The Router deployment: each replica runs the engine over its own speculation group.

In reading order: `generation` (what an Ingress requests), `router` (the deployment), `round_loop` (runs the engine's
rounds), `stream` (gathers a request's tokens), `delivery` (sends them to the Ingress) and `state` (whether the
replica can take rounds now).
"""
