"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it.

In reading order: `builder` (binds the deployments), `config` (every setting), `ingress/` (HTTP to requests for tokens),
`openai/` (the APIs' requests and responses), `grammar_check/` (compiling grammars safely), `router/` (runs the engine),
`autoscaling` (replicas by queue depth), `rollout` (replacing replicas when a setting changes), `starting` and
`start_watcher` (ending a replica whose start hangs), `errors` (exceptions to status codes), `request_id` (the id that
client, error and log share), `background` (the tasks of a replica), `metrics` and `request_metrics` (Prometheus),
`ray_exporter` (the same at Ray's exporters), `json_log` (the log as JSON), `environment` and `loopback` (how Ray must
be started), `haproxy/` (the HTTP proxy in front) and `cli` (`python -m deployments`).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the application on first use: Serve's proxy imports `ingress.proxy`, and should not load all the rest."""
    if name == "app":
        from deployments.builder import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
