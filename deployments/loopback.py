"""Loopback: Ray and Serve on one machine bind their ports to 127.0.0.1, so that other machines reach the API at most.

By default most of Ray listens on all interfaces. A token guards its own ports, but nothing guards a replica's gRPC
server, which unpickles what it receives: whoever reaches it can run code.
"""

import os
from typing import Any

LOOPBACK = "127.0.0.1"
VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, which is the default on Windows and macOS, Ray takes 127.0.0.1 as this machine's address and binds to it."""


def stay_on_this_machine() -> None:
    """Let Ray bind to 127.0.0.1, in this process and all that it starts.

    It must be called before Ray is imported, which reads the variable then.
    """
    os.environ.setdefault(VARIABLE, "0")


def bind_replica() -> None:
    """Bind the gRPC server of this replica to 127.0.0.1, if Ray does so.

    Serve binds it to all interfaces, without a setting, after it has made the deployment's object, which calls this.
    """
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() == LOOPBACK:
        bind = replica.add_port_to_grpc_server  # type: ignore[attr-defined]
        replica.add_port_to_grpc_server = _on_loopback(bind)  # type: ignore[attr-defined]


def _on_loopback(bind: Any) -> Any:
    def bind_to_loopback(server: Any, address: str) -> Any:
        return bind(server, f"{LOOPBACK}:{address.rpartition(':')[2]}")

    return bind_to_loopback
