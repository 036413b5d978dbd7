"""set_serve_environment: the environment variables with which Ray must be started.

Serve reads them when its processes start; nothing in an application's configuration can set them. `make serve` does.
On a cluster, every node needs those of SERVE_ENVIRONMENT; `RAY_SERVE_ENABLE_HA_PROXY=1` is then up to its operator.
"""

import os

from deployments.config import AppConfig
from deployments.haproxy.variables import haproxy_variables

SERVE_ENVIRONMENT = {
    # Drops headers by which clients could give the proxy orders.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.ingress.proxy:middlewares",
    # Between Serve's own proxy and Ingress: gRPC instead of Ray's actor calls.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # One event loop per process: by default every chunk changes threads twice in each of proxy, Ingress and Router,
    # which takes a third of their CPU time. Nothing here blocks a loop: tokenizing has a thread of its own.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray lowers its workers' priority by 15 otherwise, but what they do is what the machine is for.
    "RAY_worker_niceness": "0",
    # A replica that answers no health check cannot finish its streams, which another Router goes on with. By default it
    # may keep them for `drain_timeout_s` first.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A dead proxy is replaced after three failed checks; by default they are 10 s apart.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
"""What is the same for all servers."""


def serve_environment(config: AppConfig) -> dict[str, str]:
    """Return the variables for one server on this machine, with ports and files of its own."""
    chosen = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if chosen != "1":
        return SERVE_ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": chosen}
    longest_s = max(config.limits.request_timeout_s, config.drain_timeout_s)
    haproxy = haproxy_variables(config.limits, longest_stream_s=longest_s)
    return SERVE_ENVIRONMENT | haproxy


def set_serve_environment(config: AppConfig) -> None:
    """Set those variables that are not set yet, for the processes that are started from now on."""
    for name, value in serve_environment(config).items():
        os.environ.setdefault(name, value)
