"""How does one replica run the engine over its speculation group?

In reading order: `router` (the deployment), `round_loop` (runs rounds), `delivery` (sends tokens to an Ingress) and
`pooled_drafts` (the workers of a draft pool, and their leases).
"""
