"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the application when it is asked for: Serve's proxy needs `proxy`, and none of the models' libraries."""
    if name == "app":
        from deployments.builder import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
