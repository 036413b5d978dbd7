"""From the configuration to placement bundles, and from a bundle to the options of the actor in it.

Bundle 0 is the Router replica's (Serve pins a replica there, and its `ray_actor_options` must fit in it), then comes
the draft worker's, if there is a draft, then one per target rank. Serve takes one strategy for all bundles of a replica
(`placement_group_strategy`) and cannot ask for "these on one node, that one anywhere": PACK puts the target's ranks on
one node where one has room, and lets the draft go to another. A group whose ranks are apart works, slower, and says so.

CPU shares are bookkeeping, not threads: draft and target take turns on the same cores, so whole cores for each
would refuse a laptop. A group on CPU counts for less than one core; `num_threads` bounds what it really uses.
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

Bundle = dict[str, float]

DRAFT_BUNDLE = 1

REPLICA_CPUS = 0.1
DRAFT_CPUS = 0.2
TARGET_CPUS = 0.4
STRATEGY = "PACK"
DRAFT_CORES_OF = 4
"""Of so many cores the draft gets one, where it computes at the same time as the target."""

_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def placement_bundles(config: GroupConfig, *, num_gpus: float) -> list[Bundle]:
    """Return the bundles of one group on a cluster with `num_gpus` GPUs, which decide what the device "auto" means.

    A single GPU is shared by the draft and a target of one rank.
    """
    size = config.tensor_parallel_size
    target = _on_gpu(config.target, num_gpus)
    draft = config.draft is not None and _on_gpu(config.draft, num_gpus)
    share = 0.5 if target and draft and size == 1 and num_gpus == 1 else 1.0
    bundles = [{"CPU": REPLICA_CPUS}]
    if config.draft is not None:
        bundles.append(_bundle(draft, share, DRAFT_CPUS, config.draft_accelerator_type))
    rank = _bundle(target, share, TARGET_CPUS / size, config.target_accelerator_type)
    return bundles + [dict(rank) for _ in range(size)]


def settle(config: GroupConfig, bundles: Sequence[Mapping[str, float]], *, num_cores: int) -> GroupConfig:
    """Decide what `run_ahead` "auto" means on these bundles; share out the cores where both models compute at once.

    Args:
        num_cores: cores of the node that the group is on, as far as Ray may use them.
    """
    draft = config.draft
    if draft is None:
        return replace(config, run_ahead="off")
    draft_gpus, target_gpus = bundles[DRAFT_BUNDLE].get("GPU", 0), bundles[target_bundle(config, 0)].get("GPU", 0)
    on_cores = not draft_gpus and not target_gpus
    shares_gpu = 0 < draft_gpus < 1
    # Besides the workers, the Router and the Ingress compute in every round.
    is_apart = num_cores >= config.tensor_parallel_size + 2 if on_cores else not shares_gpu
    run_ahead = config.run_ahead == "on" or (config.run_ahead == "auto" and is_apart)
    config = replace(config, run_ahead="on" if run_ahead else "off")
    if not (run_ahead and on_cores):
        return config
    draft_cores = max(1, num_cores // DRAFT_CORES_OF)
    target_cores = max(1, (num_cores - draft_cores) // config.tensor_parallel_size)
    return replace(
        config,
        draft=replace(draft, num_threads=draft.num_threads or draft_cores),
        target=replace(config.target, num_threads=config.target.num_threads or target_cores),
    )


def count_cores(node_id: str) -> int:
    """Return how many cores of a node Ray may use; of this machine, if Ray does not know the node."""
    nodes: list[dict[str, Any]] = ray.nodes()
    allotted = next((node["Resources"].get("CPU", 0) for node in nodes if node["NodeID"] == node_id), 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, allotted or cores)))


def target_bundle(config: GroupConfig, rank: int) -> int:
    """Return the index of a target rank's bundle."""
    return rank + (1 if config.draft is None else 2)


def actor_options(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Return the Ray options of the actor that fills a bundle.

    An idle worker must not spin on cores that the other model needs, hence OpenMP's passive waiting. Actors are never
    restarted by Ray: a single rank cannot rejoin its world, and the group knows what else must be told.
    """
    bundle = group.bundle_specs[index]
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "max_restarts": 0,
        "max_concurrency": 4,
        "runtime_env": {"env_vars": _PASSIVE},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }


def _on_gpu(model: ModelConfig, num_gpus: float) -> bool:
    return model.device == "cuda" or (model.device == "auto" and num_gpus > 0)


def _bundle(on_gpu: bool, gpu_share: float, cpus: float, accelerator_type: str | None) -> Bundle:
    bundle = {"CPU": cpus}
    if on_gpu:
        bundle["GPU"] = gpu_share
    if accelerator_type is not None:
        bundle[f"accelerator_type:{accelerator_type}"] = 0.001
    return bundle
