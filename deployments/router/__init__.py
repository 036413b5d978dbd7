"""The Router deployment: each replica runs the engine over its own speculation group.

In reading order: `generation` (what an Ingress requests), `router` (the deployment), `round_loop` (runs the engine's
rounds), `waiting` (which requests another replica could take over), `stream` (gathers a request's tokens) and
`delivery` (sends them to the Ingress).
"""
