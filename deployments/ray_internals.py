"""Everything that this package uses of Ray Serve without a public interface; review it when Ray is upgraded.

Ray Core's private parts are in `cluster/ray_core.py`. No other module imports private modules of Ray, and
`tests/deployments/test_ray_internals.py` fails at another minor version of Ray.
"""

from typing import Any

import ray
from pydantic import PrivateAttr
from ray._private.worker import global_worker
from ray.serve import Deployment
from ray.serve._private import replica
from ray.serve._private.config import DeploymentConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentBroadcastResponse

LOOPBACK = "127.0.0.1"


def shutdown_timeout_s() -> float | None:
    """Return the seconds that Serve gives this replica to finish its requests; None until Serve stops it.

    Serve does not announce a stop, so this reads the state of its replica object.
    """
    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    stopped = next((replica for replica in replicas if replica is not None and replica._shutting_down), None)
    return None if stopped is None else float(stopped._deployment_config.graceful_shutdown_timeout_s)


def bind_replica() -> None:
    """Bind this replica's gRPC server to 127.0.0.1 if Ray's own ports are bound to it.

    Serve binds all interfaces, after constructing the deployment, and has no setting; the constructor calls this.
    """
    if ray.util.get_node_ip_address() == LOOPBACK:
        bind: Any = replica.add_port_to_grpc_server  # type: ignore[attr-defined]
        replica.add_port_to_grpc_server = lambda server, address: bind(  # type: ignore[attr-defined]
            server, f"{LOOPBACK}:{address.rpartition(':')[2]}"
        )


async def replica_calls(response: DeploymentBroadcastResponse) -> list[Any]:
    """Return the call to each replica of a broadcast; each has `get_async()`.

    The public method returns no answer at all if one replica is late.
    """
    calls: list[Any] = await response._fetch_replica_results_async()
    return calls


def base_url() -> str:
    """Return Serve's URL; empty if Serve does not run. It blocks."""
    client = _get_global_client()
    return "" if client is None else str(client.root_url)


def with_version(deployment: Deployment, version: str) -> Deployment:
    """Return the deployment with a version; Serve replaces its replicas when that changes.

    Serve would give all deployments of an application one version, derived from the application's arguments.
    """
    # `serve run` reads the option. A config file's deployment is sent to the controller as `to_proto` returns it.
    versioned = deployment.options(version=version, _internal=True)
    versioned._deployment_config = _VersionedConfig.of(versioned._deployment_config, version)
    return versioned


class _VersionedConfig(DeploymentConfig):
    """A deployment's configuration that keeps its version where Serve sets the application's."""

    _version: str = PrivateAttr()

    @classmethod
    def of(cls, config: DeploymentConfig, version: str) -> "_VersionedConfig":
        versioned = cls.model_construct(config.model_fields_set, **config.__dict__)
        versioned._version = version
        return versioned

    def to_proto(self) -> Any:
        proto: Any = super().to_proto()  # type: ignore[no-untyped-call]
        proto.version = self._version
        return proto
