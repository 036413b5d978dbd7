"""Placement: which resources a group requests from Ray, and the options of the actor in each bundle.

Bundle 0 is the Router replica's: Serve places the replica there, and its `ray_actor_options` must fit into it. The
draft worker's bundle follows, if there is a draft, then the target's. Serve takes one strategy for all bundles of a
replica (`placement_group_strategy`), but a bundle is on one node in any case: the target's ranks share one, unless
`target_nodes` spreads them, and a draft that shares a GPU with rank 0 is in that bundle, too. PACK puts everything on
one node if one has room, and the draft on another if need be.

The CPU shares only count towards Ray's totals and do not limit threads. Draft and target take turns on the same cores,
so requesting whole cores for each would keep a group from starting on a laptop; `num_threads` limits the threads.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import GroupConfig
from engine.config import ModelConfig
from engine.errors import TargetError
from engine.execution.paced.device import is_paced, parse_device

Bundle = dict[str, float]

DRAFT_BUNDLE = 1

REPLICA_CPUS = 0.1
DRAFT_CPUS = 0.2
TARGET_CPUS = 0.4
STRATEGY = "PACK"
DRAFT_CORES = 1
"""Cores of a draft on a CPU. The target's ranks share all cores, or all others where the draft runs ahead of them."""

_CPU_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "THP_MEM_ALLOC_ENABLE": "1"}
"""Environment variables of a worker, for OpenMP and torch. An idle worker must not spin on cores that the other model
needs. Weights on huge pages save page-table walks: a pass over 0.36 billion weights took 0.88 of the time."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class PlacementError(TargetError):
    """The cluster cannot hold the workers as they are configured."""


def placement_bundles(config: GroupConfig, *, num_gpus: float) -> list[Bundle]:
    """Return the bundles of one group on a cluster with `num_gpus` GPUs.

    Each worker on a GPU gets one of its own. If the cluster has only as many as the target has ranks, the draft shares
    one with rank 0, half each: on a single GPU, and where the target's ranks take up all GPUs of a node.

    Device "auto" uses the GPUs that are there. Without any, all workers run on the CPU, unless an accelerator type asks
    for a GPU; too few are an error. Device "cuda" requests GPUs in any case, and waits for nodes that are yet to join.

    Raises:
        PlacementError: the cluster has too few GPUs, an accelerator type is set for a model that is not on a GPU, the
            ranks cannot be split over `target_nodes`, or the draft cannot run ahead on the device that it shares.
    """
    if config.run_ahead == "on" and _shares_paced_device(config):
        raise PlacementError("run_ahead is on, but target and draft share a paced device, on which they take turns")
    size, num_nodes = config.tensor_parallel_size, config.target_nodes
    if size % num_nodes:
        raise PlacementError(f"tensor_parallel_size {size} is not a multiple of target_nodes {num_nodes}")
    target_on_gpu = _is_on_gpu("target", config.target, config.target_accelerator_type, num_gpus)
    draft_on_gpu = (
        config.has_draft_worker
        and config.draft is not None
        and _is_on_gpu("draft", config.draft, config.draft_accelerator_type, num_gpus)
    )
    _check_num_gpus(config, num_gpus, target_on_gpu=target_on_gpu, draft_on_gpu=draft_on_gpu)
    bundles = [{"CPU": REPLICA_CPUS}]
    if target_on_gpu and draft_on_gpu and _can_share(config) and size <= num_gpus < size + 1:
        accelerator_type = config.target_accelerator_type or config.draft_accelerator_type
        bundles.append(_bundle(size // num_nodes, DRAFT_CPUS + TARGET_CPUS / num_nodes, accelerator_type))
    else:
        if config.has_draft_worker:
            bundles.append(_bundle(int(draft_on_gpu), DRAFT_CPUS, config.draft_accelerator_type))
        bundles.append(_target_bundle(config, is_on_gpu=target_on_gpu))
    return bundles + [_target_bundle(config, is_on_gpu=target_on_gpu) for _ in range(num_nodes - 1)]


def shares_gpu(config: GroupConfig, bundles: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the draft worker is in the bundle of rank 0, on the same GPU."""
    return config.has_draft_worker and len(bundles) == 1 + config.target_nodes


def label_selectors(config: GroupConfig, bundles: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return the labels that the node of each bundle must have; the Router replica goes where the target goes.

    Raises:
        PlacementError: target and draft share a GPU, but not their labels.
    """
    target, draft = dict(config.target_label_selector), dict(config.draft_label_selector)
    if shares_gpu(config, bundles):
        if draft not in ({}, target):
            raise PlacementError("target and draft share a GPU, but the draft's label selector differs")
        return [target] * len(bundles)
    return [target, *([draft] if config.has_draft_worker else []), *([target] * config.target_nodes)]


def settle(config: GroupConfig, bundles: Sequence[Mapping[str, float]], *, num_cores: int) -> GroupConfig:
    """Resolve `run_ahead` "auto" for these bundles, and set how many cores each model's passes may use.

    Args:
        num_cores: cores of the node that the group is on, as far as Ray may use them.
    """
    target_on_cpu = not bundles[-1].get("GPU")
    draft_on_cpu = config.has_draft_worker and not bundles[DRAFT_BUNDLE].get("GPU")
    num_models = config.tensor_parallel_size * target_on_cpu + draft_on_cpu
    if is_paced(config.target.device):
        is_apart = not _shares_paced_device(config)
    else:
        # Besides the workers, the Router and the Ingress compute in every round.
        is_apart = num_cores > num_models if num_models else not shares_gpu(config, bundles)
    run_ahead = config.run_ahead == "on" or (config.run_ahead == "auto" and is_apart)
    run_ahead = run_ahead and config.has_draft_worker and config.method.can_run_ahead(config.engine)
    draft_cores = int(run_ahead and draft_on_cpu)
    target_cores = max(1, (num_cores - draft_cores) // config.tensor_parallel_size)
    target, draft = config.target, config.draft
    return replace(
        config,
        run_ahead="on" if run_ahead else "off",
        target=replace(target, num_threads=target.num_threads or target_cores),
        draft=draft and replace(draft, num_threads=draft.num_threads or DRAFT_CORES),
    )


def _shares_paced_device(config: GroupConfig) -> bool:
    """Return whether target and draft take turns on one paced device."""
    draft = config.draft
    return draft is not None and is_paced(draft.device) and parse_device(draft.device).is_shared


def count_cores(node_id: str) -> int:
    """Return how many cores of a node Ray may use; of this machine, if Ray does not know the node."""
    nodes: list[dict[str, Any]] = ray.nodes()
    allotted = next((node["Resources"].get("CPU", 0) for node in nodes if node["NodeID"] == node_id), 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, allotted or cores)))


def target_bundle(config: GroupConfig, bundles: Sequence[Mapping[str, float]], rank: int) -> int:
    """Return the index of a target rank's bundle."""
    return len(bundles) - config.target_nodes + rank // (config.tensor_parallel_size // config.target_nodes)


def draft_options(config: GroupConfig, group: PlacementGroup) -> dict[str, Any]:
    """Return the Ray options of the draft's actor."""
    num_gpus = 0.5 if shares_gpu(config, group.bundle_specs) else group.bundle_specs[DRAFT_BUNDLE].get("GPU", 0)
    return _actor_options(group, DRAFT_BUNDLE, DRAFT_CPUS, num_gpus)


def rank_beside_draft(config: GroupConfig, group: PlacementGroup) -> int | None:
    """Return the first target rank on the draft's device, None if the draft has a device of its own.

    Ray is asked for the nodes of the bundles, which must have been placed.
    """
    bundles = group.bundle_specs
    if not config.has_draft_worker:
        return None
    if shares_gpu(config, bundles):
        return 0
    if bundles[DRAFT_BUNDLE].get("GPU") or bundles[-1].get("GPU"):
        return None
    nodes = placement_group_table(group)["bundles_to_node_id"]
    ranks = range(config.tensor_parallel_size)
    return next((rank for rank in ranks if nodes[target_bundle(config, bundles, rank)] == nodes[DRAFT_BUNDLE]), None)


def rank_options(config: GroupConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    """Return the Ray options of a target rank's actor."""
    bundles = group.bundle_specs
    num_gpus = float(bundles[-1].get("GPU", 0) > 0)
    if rank == 0 and shares_gpu(config, bundles):
        num_gpus = 0.5
    # Ray counts in units of 0.0001 and rounds; all ranks together must fit into their bundle.
    num_cpus = math.floor(TARGET_CPUS / config.tensor_parallel_size * 1e4) / 1e4
    return _actor_options(group, target_bundle(config, bundles, rank), num_cpus, num_gpus)


def _actor_options(group: PlacementGroup, index: int, num_cpus: float, num_gpus: float) -> dict[str, Any]:
    """Return the Ray options of an actor in a bundle.

    An actor without a GPU must not see one: Ray leaves the node's CUDA_VISIBLE_DEVICES as it is for such actors, and
    the device "auto" would take the first GPU. Ray does not restart actors: a single rank cannot rejoin the others, and
    a restart is the group's task.
    """
    return {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": 0,
        "max_concurrency": 4,
        "runtime_env": {"env_vars": _CPU_SETTINGS if num_gpus else _CPU_SETTINGS | _NO_GPU},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def _is_on_gpu(role: str, model: ModelConfig, accelerator_type: str | None, num_gpus: float) -> bool:
    if (model.device == "cpu" or is_paced(model.device)) and accelerator_type is not None:
        raise PlacementError(
            f"{role}_accelerator_type is {accelerator_type}, but the {role}'s device is {model.device}"
        )
    return model.device == "cuda" or (model.device == "auto" and (num_gpus > 0 or accelerator_type is not None))


def _can_share(config: GroupConfig) -> bool:
    """Return whether one GPU can fit both accelerator types."""
    return len({config.target_accelerator_type, config.draft_accelerator_type} - {None}) <= 1


def _check_num_gpus(config: GroupConfig, num_gpus: float, *, target_on_gpu: bool, draft_on_gpu: bool) -> None:
    """Refuse a group that device "auto" cannot place on the cluster's GPUs, instead of waiting for more GPUs."""
    devices = {config.target.device} if target_on_gpu else set()
    if config.draft is not None and draft_on_gpu:
        devices.add(config.draft.device)
    num_target = config.tensor_parallel_size * target_on_gpu
    num_draft = int(draft_on_gpu and not (target_on_gpu and _can_share(config)))
    if num_gpus < num_target + num_draft and "auto" in devices:
        draft = f" and the draft {num_draft}" if num_draft else ""
        raise PlacementError(
            f"device is auto and the target needs {num_target} GPUs{draft}, but the cluster has {num_gpus:g}; "
            "device=cuda would wait until there are enough, device=cpu would use none"
        )


def _target_bundle(config: GroupConfig, *, is_on_gpu: bool) -> Bundle:
    num_ranks = config.tensor_parallel_size // config.target_nodes
    return _bundle(num_ranks * is_on_gpu, TARGET_CPUS / config.target_nodes, config.target_accelerator_type)


def _bundle(num_gpus: int, num_cpus: float, accelerator_type: str | None) -> Bundle:
    bundle = {"CPU": round(num_cpus, 4)}
    if num_gpus:
        bundle["GPU"] = float(num_gpus)
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = 0.001
    return bundle
