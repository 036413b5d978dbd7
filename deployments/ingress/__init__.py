"""The Ingress deployment: HTTP in, text out.

In reading order: `routes` (the FastAPI application), `health` (its health routes), `middleware` (limits and the API
key), `admission` (refuses what the Routers have no room for), `proxy` (middleware for Serve's proxy), `body` (parses
bodies one at a time), `outline` (measures them first), `ingress` (serves each route), `prompts` (text to token ids),
`lanes` (the threads for that), `pieces` (where long texts may be cut), `conversation` (the chat template), `parameters`
(request fields to sampling parameters), `router_client` (sends requests to Routers), `request_router` (which Router
takes a request), `router_loads` (how full they are), `lasting_outputs` (sends requests again if a Router is lost),
`counted_outputs` (counts them), `moving` (moves them if another Router has less to do), `arrivals` (the tokens that
come back), `draining` (ends streams that outlast a shutdown), `answer` (a whole or streamed response), `idle_timer`
(tells it that a stream is silent), `readiness` (what Routers said of themselves) and `broadcast` (calls to all
replicas). Beside them `tokenization` and `server_info` (the bodies of the smaller routes).
"""
