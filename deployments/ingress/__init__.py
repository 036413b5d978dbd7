"""HTTP in, text out: ingress, routes, middleware, proxy, prompts, answer, router_client."""
