"""Placement: which resources a group requests from Ray, and the options of the actor in each bundle.

Bundle 0 holds the Router replica. The last bundle holds all target ranks, because a bundle is on one node. The
group's own draft worker has bundle 1, or shares the last bundle with rank 0, on the same GPU. A pool's draft workers
are replicas of another deployment.

CPU shares count towards Ray's totals but limit no threads: draft and target take turns on the cores of a laptop.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import DRAFT_CORES, GroupConfig
from engine.config import ModelConfig
from engine.errors import TargetError
from engine.execution.vllm.arguments import environment

Bundle = dict[str, float]

DRAFT_BUNDLE = 1

REPLICA_CPUS = 0.1
DRAFT_CPUS = 0.2
TARGET_CPUS = 0.4
STRATEGY = "PACK"

_CPU_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "THP_MEM_ALLOC_ENABLE": "1"}
"""For OpenMP and torch: an idle worker must not spin on cores that the other model needs. Weights on huge pages save
page-table walks: a pass over 0.36 billion weights took 0.88 of the time."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_ITS_GPU: dict[str, str] = {}
"""Ray shows an actor its own GPUs only."""
_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""vLLM chooses a rank's GPU by its index, and ranks reach each other's memory, so every rank sees all GPUs."""


class PlacementError(TargetError):
    """The cluster cannot hold the workers as they are configured."""


def placement_bundles(config: GroupConfig, *, num_gpus: float) -> list[Bundle]:
    """Return the bundles of a group on a cluster with `num_gpus` GPUs.

    Each worker gets a whole GPU; if none is left for the draft, the draft shares rank 0's. Device "auto" is the
    CPU if there is no GPU, and too few raise PlacementError. Device "cuda" waits for nodes that are yet to join.
    """
    size, draft = config.tensor_parallel_size, config.draft if config.places_draft_worker else None
    num_target = size * _is_on_gpu(config.target, num_gpus)
    num_draft = int(draft is not None and _is_on_gpu(draft, num_gpus))
    can_share = num_target and num_draft and config.draft_label_selector in ({}, config.target_label_selector)
    num_apart = 0 if can_share else num_draft
    devices = {config.target.device if num_target else "", draft.device if draft and num_draft else ""}
    if num_gpus < num_target + num_apart and "auto" in devices:
        and_draft = f" and the draft {num_apart}" if num_apart else ""
        raise PlacementError(
            f"device is auto and the target needs {num_target} GPUs{and_draft}, but the cluster has {num_gpus:g}; "
            "device=cuda would wait until there are enough, device=cpu would use none"
        )
    bundles = [{"CPU": REPLICA_CPUS}]
    if can_share and num_target <= num_gpus < num_target + 1:
        return [*bundles, _bundle(num_target, DRAFT_CPUS + TARGET_CPUS)]
    if draft is not None:
        bundles.append(_bundle(num_draft, DRAFT_CPUS))
    return [*bundles, _bundle(num_target, TARGET_CPUS)]


def shares_gpu(config: GroupConfig, bundles: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the draft worker is in the bundle of rank 0, on the same GPU."""
    return config.places_draft_worker and len(bundles) == 2


def label_selectors(config: GroupConfig, bundles: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return the labels that the node of each bundle must have; the Router replica goes where the target goes."""
    target, draft = dict(config.target_label_selector), dict(config.draft_label_selector)
    return [target, draft, target] if len(bundles) > DRAFT_BUNDLE + 1 else [target] * len(bundles)


def make_placement(config: GroupConfig) -> PlacementGroup:
    """Ask Ray for the bundles of a group's workers, without waiting until they are placed."""
    resources: dict[str, float] = ray.cluster_resources()
    bundles = placement_bundles(config, num_gpus=resources.get("GPU", 0))
    selectors = label_selectors(config, bundles)
    placement: PlacementGroup = ray.util.placement_group(bundles, strategy=STRATEGY, bundle_label_selector=selectors)
    return placement


def share_cores(config: GroupConfig, bundles: Sequence[Mapping[str, float]], *, num_cores: int) -> GroupConfig:
    """Resolve `run_ahead` "auto" for these bundles, and set how many of the node's cores each model may use."""
    target_on_cpu = not bundles[-1].get("GPU")
    draft_on_cpu = config.places_draft_worker and not bundles[DRAFT_BUNDLE].get("GPU")
    num_models = config.tensor_parallel_size * target_on_cpu + draft_on_cpu
    # The Router and the Ingress compute in every round, too.
    is_apart = num_cores > num_models if num_models else not shares_gpu(config, bundles)
    run_ahead = _runs_ahead(config, is_apart=is_apart)
    draft_cores = int(run_ahead and draft_on_cpu)
    target_cores = max(1, (num_cores - draft_cores) // config.tensor_parallel_size)
    target, draft = config.target, config.draft
    return replace(
        config,
        run_ahead="on" if run_ahead else "off",
        target=replace(target, num_threads=target.num_threads or target_cores),
        draft=draft and replace(draft, num_threads=draft.num_threads or DRAFT_CORES),
    )


def settle_shared(config: GroupConfig, *, has_gpu: bool, num_cores: int) -> GroupConfig:
    """Return the settings of a draft worker that several groups share, with `run_ahead` "auto" resolved."""
    run_ahead = _runs_ahead(config, is_apart=has_gpu or num_cores > 2)
    draft = config.draft and replace(config.draft, num_threads=config.draft.num_threads or DRAFT_CORES)
    return replace(config, draft=draft, run_ahead="on" if run_ahead else "off")


def _runs_ahead(config: GroupConfig, *, is_apart: bool) -> bool:
    wanted = config.run_ahead == "on" or (config.run_ahead == "auto" and is_apart)
    return wanted and config.has_draft_worker and config.engine.verification in config.method.runs_ahead


def count_cores(node_id: str) -> int:
    """Return how many cores of a node Ray may use; of this machine, if Ray does not know the node."""
    nodes: list[dict[str, Any]] = ray.nodes()
    allotted = next((node["Resources"].get("CPU", 0) for node in nodes if node["NodeID"] == node_id), 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, allotted or cores)))


def draft_options(config: GroupConfig, group: PlacementGroup) -> dict[str, Any]:
    """Return the Ray options of the draft's actor."""
    num_gpus = 0.5 if shares_gpu(config, group.bundle_specs) else group.bundle_specs[DRAFT_BUNDLE].get("GPU", 0)
    return _actor_options(group, DRAFT_BUNDLE, DRAFT_CPUS, num_gpus, _ITS_GPU)


def pool_bundle(config: GroupConfig, *, num_gpus: float) -> Bundle:
    """Return what one draft worker of a pool takes of a cluster with `num_gpus` GPUs."""
    return _bundle(int(config.draft is not None and _is_on_gpu(config.draft, num_gpus)), DRAFT_CPUS)


def pool_options(config: GroupConfig, *, num_gpus: float) -> dict[str, Any]:
    """Return the options of a pool's Serve replicas, each of which is a draft worker."""
    bundle = pool_bundle(config, num_gpus=num_gpus)
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "label_selector": dict(config.draft_label_selector),
        "runtime_env": {"env_vars": _CPU_SETTINGS | (_ITS_GPU if bundle.get("GPU") else _NO_GPU)},
    }


def rank_beside_draft(config: GroupConfig, group: PlacementGroup) -> int | None:
    """Return the first target rank on the draft's device; None without any. Ray must have placed the bundles."""
    bundles = group.bundle_specs
    if not config.places_draft_worker:
        return None
    if shares_gpu(config, bundles):
        return 0
    if bundles[DRAFT_BUNDLE].get("GPU") or bundles[-1].get("GPU"):
        return None
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return 0 if nodes[len(bundles) - 1] == nodes[DRAFT_BUNDLE] else None


def rank_options(config: GroupConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Return the Ray options of a target rank's actor."""
    bundles = group.bundle_specs
    num_gpus = float(bundles[-1].get("GPU", 0) > 0)
    if rank == 0 and shares_gpu(config, bundles):
        num_gpus = 0.5
    # Ray counts in units of 0.0001 and rounds; all ranks together must fit into their bundle.
    num_cpus = math.floor(TARGET_CPUS / config.tensor_parallel_size * 1e4) / 1e4
    sees = _ITS_GPU if config.tensor_parallel_size == 1 else _ALL_GPUS
    options = _actor_options(group, len(bundles) - 1, num_cpus, num_gpus, sees)
    if config.target.execution == "vllm":
        options["runtime_env"]["env_vars"] |= environment(config.target)
    return options


def _actor_options(
    group: PlacementGroup, index: int, num_cpus: float, num_gpus: float, sees: dict[str, str]
) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": 0,  # a single rank cannot rejoin the others; the group restarts all
        "max_concurrency": 4,
        # Ray hides no GPU from an actor without GPUs, and the device "auto" would take it.
        "runtime_env": {"env_vars": _CPU_SETTINGS | (sees if num_gpus else _NO_GPU)},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def _is_on_gpu(model: ModelConfig, num_gpus: float) -> bool:
    return model.device == "cuda" or (model.device == "auto" and num_gpus > 0)


def _bundle(num_gpus: int, num_cpus: float) -> Bundle:
    return {"CPU": num_cpus, **({"GPU": float(num_gpus)} if num_gpus else {})}
