"""How does one replica run the engine over its speculation group?

In reading order: `router` (the deployment), `round_loop` (runs the engine's rounds), `delivery` (gathers a request's
tokens and sends them to its Ingress) and `pooled_drafts` (a pool's deployment, and its leases).
"""
