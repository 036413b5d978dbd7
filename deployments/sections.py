"""Sections of the settings: what a Router, a pool's draft worker and an Ingress read.

A changed setting replaces only the replicas that read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from cluster.config import GroupConfig, LogFormat
from deployments.config import AppConfig, ArgumentError, Limits
from engine.config import ModelConfig
from engine.execution.vllm.arguments import ADAPTERS


def group_config(config: AppConfig) -> GroupConfig:
    """Return the settings of one speculation group: all that a Router reads."""
    target, draft, engine = config.settled
    return GroupConfig(
        target=target,
        draft=draft,
        engine=engine,
        target_label_selector=config.label_selector.target,
        draft_label_selector=config.label_selector.draft,
        **_same_names(GroupConfig, config),
    )


def pool_config(group: GroupConfig) -> GroupConfig:
    """Return the settings that a pool's draft worker reads; of the target it reads only files."""
    target = ModelConfig(group.target.path, group.target.revision, execution=group.target.execution)
    names = "draft engine run_ahead draft_pool draft_label_selector hang_timeout_s start_timeout_s log_format"
    names += " draft_learning draft_learning_share draft_learning_path"
    return GroupConfig(target, **{name: getattr(group, name) for name in names.split()})


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """Every setting that an Ingress reads."""

    target: ModelConfig
    tensor_parallel_size: int
    verification: str
    model_name: str
    limits: Limits
    stream_interval_s: float
    cors_allow_origins: tuple[str, ...]
    page: Literal["on", "off", "demo"]
    draft_pool: bool
    share_between_keys: bool
    start_timeout_s: float
    log_format: LogFormat
    record: Path | None
    adapters: Mapping[str, str | None]
    """The LoRA adapter by each model name that clients may send; the target's own name has none."""


def ingress_config(config: AppConfig) -> IngressConfig:
    """Return the settings of an Ingress."""
    target = replace(config.settled.target, head=None)  # not loaded by an Ingress
    own, adapters = config.model_name, dict[str, str | None]()
    for name in target.vllm.get(ADAPTERS, {}):
        if name.partition(":")[0] == own:
            raise ArgumentError(f"vllm: {ADAPTERS} names {name!r}, but clients call the target {own!r}")
        adapters |= {name: name, f"{own}:{name}": name}
    return IngressConfig(
        target=target,
        verification=config.pair.verification,
        adapters={own: None, **adapters},
        **_same_names(IngressConfig, config),
    )


def _same_names(section: type[GroupConfig] | type[IngressConfig], config: AppConfig) -> dict[str, Any]:
    """Return the settings that the application and a section name alike; `draft_pool` becomes a bool."""
    alike = {field.name: getattr(config, field.name) for field in fields(section) if hasattr(config, field.name)}
    return alike | {"draft_pool": config.draft_pool is not None}
