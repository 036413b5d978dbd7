"""HTTP in, text out.

ingress, routes, middleware, proxy, prompts, parameters, answer, router_client, tokenization, server_info.
"""
