"""SERVE_ENVIRONMENT: the environment variables with which Ray must be started, on every node.

Serve reads them when its processes start; nothing in an application's configuration can set them. `make serve` does.
"""

import os

SERVE_ENVIRONMENT = {
    # Drops headers by which clients could give the proxy orders.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.ingress.proxy:middlewares",
    # Between proxy and Ingress: gRPC instead of Ray's actor calls.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # One event loop per process: by default every chunk changes threads twice in each of proxy, Ingress and Router,
    # which takes a third of their CPU time. Nothing here blocks a loop: tokenizing has a thread of its own.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray lowers its workers' priority by 15 otherwise, but what they do is what the machine is for.
    "RAY_worker_niceness": "0",
    # A dead proxy is replaced after three failed checks; by default they are 10 s apart.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}


def set_serve_environment() -> None:
    """Set those variables that are not set yet, for the processes that are started from now on."""
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
