"""The parts of Ray Serve without a public interface that this package uses; review them when Ray is upgraded."""

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
    """Return how long Serve lets this replica finish its requests; None until Serve stops it."""
    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    stopped = next((replica for replica in replicas if replica is not None and replica._shutting_down), None)
    return None if stopped is None else float(stopped._deployment_config.graceful_shutdown_timeout_s)


def bind_replica() -> None:
    """Let Serve bind this replica's gRPC server to 127.0.0.1 if Ray's ports are; for the deployment's constructor."""
    if ray.util.get_node_ip_address() == LOOPBACK:
        bind: Any = replica.add_port_to_grpc_server  # type: ignore[attr-defined]
        replica.add_port_to_grpc_server = lambda server, address: bind(  # type: ignore[attr-defined]
            server, f"{LOOPBACK}:{address.rpartition(':')[2]}"
        )


async def replica_calls(response: DeploymentBroadcastResponse) -> list[Any]:
    """Return the call to each replica of a broadcast; the public method waits for all of them."""
    calls: list[Any] = await response._fetch_replica_results_async()
    return calls


def base_url() -> str:
    """Return Serve's URL, empty if Serve does not run; blocks."""
    client = _get_global_client()
    return "" if client is None else str(client.root_url)


def with_version(deployment: Deployment, version: str) -> Deployment:
    """Return the deployment with a version of its own, so that Serve replaces its replicas only if that changes."""
    # `serve run` reads the option. A config file's deployment is sent to the controller by `to_proto`.
    versioned = deployment.options(version=version, _internal=True)
    versioned._deployment_config = _VersionedConfig.of(versioned._deployment_config, version)
    return versioned


class _VersionedConfig(DeploymentConfig):
    """A deployment's configuration that keeps its version when Serve sets the application's version."""

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
