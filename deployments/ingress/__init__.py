"""The Ingress deployment: HTTP in, text out.

In reading order: `routes` (the FastAPI application), `middleware` (limits and the API key), `proxy` (middleware for
Serve's proxy), `ingress` (serves each route), `prompts` (text to token ids), `parameters` (request fields to sampling
parameters), `router_client` (sends requests to Routers), `lasting_outputs` (sends them again if a Router is lost),
`counted_outputs` (counts them), `arrivals` (the tokens that come back), `answer` (a whole or streamed response),
`idle_timer` (tells it that a stream is silent). Beside them `tokenization` and `server_info` (the bodies of the smaller
routes).
"""
