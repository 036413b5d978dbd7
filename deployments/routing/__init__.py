"""Which Router, and what if it dies?

In reading order: `client` (all that an Ingress does with Routers, by Serve's calls and its inbox), `loads` (how each
Router is, and which one takes a request), `prefixes` (which ones hold a prompt's first tokens), `resumable_stream` (the
outputs of one request, across Routers, and whether another Router is asked) and `moving` (which waiting requests leave
for another Router).
"""
