"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it.

builder, config, cli; ingress, openai, grammar_check; router; autoscaling, errors, metrics.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the application on first use: Serve's proxy imports `ingress.proxy`, and should not load all the rest."""
    if name == "app":
        from deployments.builder import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
