"""Which Router, and what if it dies?

In reading order: `client` (an Ingress's calls and inbox), `loads` (each Router's load), `choice` (which Router takes a
request), `prefixes` (which Routers hold its first tokens), `resumable_stream` (its outputs, across Routers) and
`moving` (which waiting requests leave for another Router).
"""
