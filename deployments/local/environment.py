"""set_serve_environment: the variables that Ray must be started with; no application's configuration can set them.

`make serve` sets them. On a cluster, every node needs `SERVE_ENVIRONMENT`; `RAY_SERVE_ENABLE_HA_PROXY=1` is optional.
"""

import os

from deployments.config import AppConfig
from deployments.local.haproxy_variables import haproxy_variables

SERVE_ENVIRONMENT = {
    # Drops the headers that Serve's proxy would take as commands.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.guard.middleware:middlewares",
    # Between Serve's own proxy and Ingress: gRPC instead of Ray's actor calls.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # One event loop per process: changing threads twice for every chunk, the default, takes a third of the CPU time.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # By default Ray lowers its workers' priority by 15, but their work is the purpose of the machine.
    "RAY_worker_niceness": "0",
    # By default a replica that answers no health check keeps its streams, which another Router could continue.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # By default Serve's start fails if a proxy takes longer than 5 s, as on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A dead proxy is replaced after three failed checks; by default they are 10 s apart.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
"""Variables for every server."""


def serve_environment(config: AppConfig) -> dict[str, str]:
    """Return the variables for a server on this machine, which may run several."""
    chosen = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if chosen != "1":
        return SERVE_ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": chosen}
    longest_s = max(config.limits.request_timeout_s, config.drain_timeout_s)
    haproxy = haproxy_variables(longest_stream_s=longest_s)
    return SERVE_ENVIRONMENT | haproxy


def set_serve_environment(config: AppConfig) -> None:
    """Set the variables that are not set yet, for the processes that this process starts."""
    for name, value in serve_environment(config).items():
        os.environ.setdefault(name, value)
