"""How does one HTTP replica answer a request?

In reading order: `ingress` (the deployment, whose methods answer the routes), `routes` (the application around them),
`answer` (a whole or streamed response), `event_ids` and `pieces` (where a stream continues after a lost connection),
`health`, `server_info` (models, version, fingerprint) and `draining` (ends streams at a shutdown).
"""
