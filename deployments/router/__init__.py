"""How does one replica run the engine over its speculation group?

In reading order: `router` (the deployment), `round_loop` (runs the engine's rounds), `delivery` (gathers a request's
tokens and sends them to its Ingress), `draft_leases` (where a Router's drafts come from, with a draft pool) and
`draft_replica` (the deployment of the pool's workers).
"""
