"""How does one HTTP replica answer a request?

- `ingress`: the deployment, whose methods answer the routes.
- `routes`: the application around them: Guard, CORS, the form of errors.
- `answer`: a whole or streamed response.
- `health`: /live, /ready and /health.
- `server_info`: models, version, fingerprint.
- `event_ids`: where a stream continues after a lost connection.
- `pieces`: rounds that are joined or cut for an event.
- `draining`: ends streams that outlast a shutdown.
"""
