"""The Router deployment: each replica runs the engine over its own speculation group.

In reading order: `generation` (what an Ingress requests), `router` (the deployment), `round_loop` (runs the engine's
rounds), `waiting` (which requests another replica could take over), `drain_rate` (how fast requests finish), `stream`
(gathers a request's tokens), `delivery` (sends them to the Ingress), `load` (what it is told of the queue), `state`
(whether the replica can take rounds now) and `stopping` (whether Serve has stopped it).
"""
