"""The Ray Serve application: HTTP in, text out. `serve run deployments:app` runs it.

The folders, in a request's order: `guard/` (may it enter?), `openai/` and `anthropic/` (what does it ask for?),
`prompts/` (which token ids is that?), `ingress/` (the HTTP replica), `routing/` (which Router, and what if it dies?),
`router/` (a replica of the engine) and `records/` (how is an answer kept, and audited?). Beside them: `page/` (for
browsers), `observe/` (metrics, logs, traces), `local/` (for one machine only), `cli/` (`paceline` and
`python -m deployments`) and `diagnosis/` (is all well?).

The files, to be read first: `builder` (binds the deployments), `wire` (messages between Ingress and Router), `config`
(every setting), `sections` (which process reads which), `errors` (exceptions to status codes), `autoscaling` and
`ray_internals` (Serve's private parts).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the application on first use, because Serve's proxy and the commands do not need it."""
    if name == "app":
        from deployments.builder import app

        return app
    if name == "__version__":
        from deployments.ingress.server_info import installed_version

        return installed_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
