"""Rollout: what each deployment needs of the settings, and how Serve replaces its replicas when that changes.

Serve gives all deployments of an application the same version, which it derives from the application's arguments, so
a change of any argument restarts them all. Here a deployment's version is a digest of what its replicas are made from:
a changed draft restarts Routers, a changed limit Ingresses, and a changed number of replicas neither.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import PrivateAttr
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

from deployments.config import AppConfig, LabelSelector
from deployments.ingress.server_info import installed_version
from engine.config import PairConfig

_ONLY_THE_BUILDERS = {"autoscaling", "num_ingress_replicas", "drain_timeout_s", "api_keys", "api_key_file"}
NOT_THE_ROUTERS = _ONLY_THE_BUILDERS | {
    "limits",
    "stream_interval_s",
    "per_request_spec_decode_metrics",
    "cors_allow_origins",
}
"""Settings that no Router reads."""
NOT_THE_INGRESSES = _ONLY_THE_BUILDERS | {
    "target_accelerator_type",
    "draft_accelerator_type",
    "target_nodes",
    "run_ahead",
    "draft_timeout_s",
    "verify_timeout_s",
    "max_recoveries",
    "round_timeout_s",
}
"""Settings that no Ingress reads."""
PAIR_OF_THE_INGRESSES = ("target_model", "target_revision", "target_quantization", "device", "dtype", "verification")
"""The settings of the pair that an Ingress reads; it loads the target's tokenizer."""


def router_settings(config: AppConfig) -> AppConfig:
    """Return the settings with defaults for those that no Router reads."""
    labels = config.label_selector.model_copy(update={"ingress": {}})
    return _without(config, NOT_THE_ROUTERS).model_copy(update={"label_selector": labels})


def ingress_settings(config: AppConfig) -> AppConfig:
    """Return the settings with defaults for those that no Ingress reads; the API keys are passed beside them."""
    pair = PairConfig(**{name: getattr(config.pair, name) for name in PAIR_OF_THE_INGRESSES})
    labels = LabelSelector(ingress=config.label_selector.ingress)
    return _without(config, NOT_THE_INGRESSES).model_copy(update={"pair": pair, "label_selector": labels})


def with_version_of(deployment: Deployment, settings: AppConfig, keys: Sequence[str] = ()) -> Deployment:
    """Return the deployment with a version that depends on these arguments and on this package's version alone.

    What is behind a path is not looked at: new files of a model need a restart.
    """
    made_from = [settings.model_dump_json(), *keys, installed_version()]
    version = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    # `serve run` takes it from here, a config file's deployment from the configuration that is sent to the controller.
    versioned = deployment.options(version=version, _internal=True)
    versioned._deployment_config = _VersionedConfig.of(versioned._deployment_config, version)
    return versioned


def surge_percent(num_replicas: int, room: int) -> int:
    """Return how many replicas, in percent, Serve may start before it stops those that they replace.

    Args:
        num_replicas: replicas at most.
        room: how many of them the cluster can hold. Without room for one more, Serve would wait for it and replace
            none, so it must stop one first; new requests wait meanwhile if that was the only one.
    """
    # Serve takes the percentage of the replicas there are and rounds up; together they never exceed `room`.
    return min(100, max(0, 100 * (room - num_replicas) // num_replicas))


class _VersionedConfig(DeploymentConfig):
    """Serve's configuration of a deployment, which keeps its version where Serve sets that of the application."""

    _version: str = PrivateAttr()

    @classmethod
    def of(cls, config: DeploymentConfig, version: str) -> "_VersionedConfig":
        """Return the configuration with a version."""
        versioned = cls.model_construct(config.model_fields_set, **config.__dict__)
        versioned._version = version
        return versioned

    def to_proto(self) -> Any:
        """Return what is sent to Serve's controller."""
        proto: Any = super().to_proto()  # type: ignore[no-untyped-call]
        proto.version = self._version
        return proto


def _without(config: AppConfig, names: set[str]) -> AppConfig:
    defaults = AppConfig()
    return config.model_copy(update={name: getattr(defaults, name) for name in names})
