"""May a request enter?

- `middleware`: request ids, API keys, sizes of headers and bodies, clients that leave.
- `admission`: 429 with Retry-After while the Routers' queues are full; the time is from `deployments/wire.py`.
- `body`: parses JSON, with a limit on its values.
"""
