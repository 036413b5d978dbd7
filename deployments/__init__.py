"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it.

The folders stand in the order of a request's way: `guard/` (may it enter?), `openai/` (what does it ask for?),
`anthropic/` (the same in Anthropic's form), `prompts/` (which token ids is that?), `ingress/` (the HTTP replica that
joins these), `routing/` (which Router, and what if it dies?) and `router/` (one replica of the engine). `page/` is what
a browser sees, `observe/` what operators see, `local/` what there is only on one machine, `cli/` what a person types
(`paceline`, and `python -m deployments`), `diagnosis/` whether all is well, and true.

The trunk, to be read first: `builder` (binds the deployments), `wire` (what Ingress and Router say to each other),
`config` (every setting), `errors` (exceptions to status codes), `autoscaling` (numbers of replicas) and
`ray_internals` (Serve's private parts).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the application on first use: Serve's proxy and the commands import this package without all the rest."""
    if name == "app":
        from deployments.builder import app

        return app
    if name == "__version__":
        from deployments.ingress.server_info import installed_version

        return installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
