"""Placement: which resources a group requests from Ray, and the options of the actor in each bundle.

Bundle 0 is the Router replica's: Serve places the replica there, and its `ray_actor_options` must fit into it. The
draft worker's bundle follows, if there is a draft, then one bundle per target rank. Serve takes one strategy for all
bundles of a replica (`placement_group_strategy`), so it cannot keep the ranks on one node and let the draft go
anywhere. PACK puts the ranks on one node if one has room, and the draft on another if need be. A group whose ranks are
on several nodes works, slower, and logs a warning.

The CPU shares only count towards Ray's totals and do not limit threads. Draft and target take turns on the same cores,
so requesting whole cores for each would keep a group from starting on a laptop; `num_threads` limits the threads.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
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
        PlacementError: the cluster has too few GPUs, an accelerator type is set for a model that is not on a GPU, or
            the draft cannot run ahead on the device that it shares.
    """
    if config.run_ahead == "on" and _shares_paced_device(config):
        raise PlacementError("run_ahead is on, but target and draft share a paced device, on which they take turns")
    size = config.tensor_parallel_size
    target_on_gpu = _is_on_gpu("target", config.target, config.target_accelerator_type, num_gpus)
    draft_on_gpu = (
        config.has_draft_worker
        and config.draft is not None
        and _is_on_gpu("draft", config.draft, config.draft_accelerator_type, num_gpus)
    )
    _check_num_gpus(config, num_gpus, target_on_gpu=target_on_gpu, draft_on_gpu=draft_on_gpu)
    shares = target_on_gpu and draft_on_gpu and _can_share(config) and size <= num_gpus < size + 1
    share = 0.5 if shares else 1.0
    bundles = [{"CPU": REPLICA_CPUS}]
    if config.has_draft_worker:
        bundles.append(_bundle(share * draft_on_gpu, DRAFT_CPUS, config.draft_accelerator_type))
    for rank in range(size):
        num = share if rank == 0 else 1.0
        bundles.append(_bundle(num * target_on_gpu, TARGET_CPUS / size, config.target_accelerator_type))
    return bundles


def settle(config: GroupConfig, bundles: Sequence[Mapping[str, float]], *, num_cores: int) -> GroupConfig:
    """Resolve `run_ahead` "auto" for these bundles, and set how many cores each model's passes may use.

    Args:
        num_cores: cores of the node that the group is on, as far as Ray may use them.
    """
    target_gpus = bundles[target_bundle(config, 0)].get("GPU", 0)
    draft_gpus = bundles[DRAFT_BUNDLE].get("GPU", 0) if config.has_draft_worker else 0
    num_models = config.tensor_parallel_size * (not target_gpus) + (config.has_draft_worker and not draft_gpus)
    shares_gpu = 0 < draft_gpus < 1
    if is_paced(config.target.device):
        is_apart = not _shares_paced_device(config)
    else:
        # Besides the workers, the Router and the Ingress compute in every round.
        is_apart = num_cores > num_models if num_models else not shares_gpu
    run_ahead = config.run_ahead == "on" or (config.run_ahead == "auto" and is_apart)
    run_ahead = run_ahead and config.has_draft_worker
    draft_cores = int(run_ahead and not draft_gpus)
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


def target_bundle(config: GroupConfig, rank: int) -> int:
    """Return the index of a target rank's bundle."""
    return rank + (2 if config.has_draft_worker else 1)


def actor_options(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Return the Ray options of the actor that fills a bundle.

    An actor whose bundle has no GPU must not see one: Ray leaves the node's CUDA_VISIBLE_DEVICES as it is for such
    actors, and the device "auto" would take the first GPU. Ray does not restart actors: a single rank cannot rejoin the
    others, and a restart is the group's task.
    """
    bundle = group.bundle_specs[index]
    num_gpus = bundle.get("GPU", 0)
    return {
        "num_cpus": bundle.get("CPU", 0),
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


def _bundle(num_gpus: float, num_cpus: float, accelerator_type: str | None) -> Bundle:
    bundle = {"CPU": num_cpus}
    if num_gpus:
        bundle["GPU"] = num_gpus
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = 0.001
    return bundle
