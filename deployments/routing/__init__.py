"""Which Router, and what if it dies?

- `client`: all that an Ingress does with Routers, by Serve's calls and its inbox.
- `loads`: how each Router is; `choice`: which Router takes a request; `prefixes`: which Routers hold its first tokens.
- `resumable_stream`: the outputs of one request, across Routers, and whether another Router is asked.
- `moving`: which waiting requests leave for another Router.
"""
