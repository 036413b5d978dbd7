"""Capacity: how many groups the nodes of a cluster can hold, and why a bundle does not fit."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.placement import Bundle, PlacementError, label_selectors, pool_bundle, shares_gpu
from cluster.ray_core import available_resources_per_node, node_labels_match_selector

_EPSILON = 1e-6

_PLACED_BEFORE_START = 0.8
"""Share of `start_timeout_s` after which a placement has failed."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster: its free resources and labels."""

    resources: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slot:
    """A bundle that needs a node: its purpose, its resources, and the labels its node must have."""

    name: str
    bundle: Bundle
    label_selector: Mapping[str, str]

    def shortage(self, node: Node) -> str:
        """Return the node's missing resources and labels; empty if the bundle fits."""
        lacking = {
            name: amount - node.resources.get(name, 0)
            for name, amount in self.bundle.items()
            if node.resources.get(name, 0) + _EPSILON < amount
        }
        labels = [
            f"label {name}={value}"
            for name, value in self.label_selector.items()
            if not node_labels_match_selector(dict(node.labels), {name: value})
        ]
        return ", ".join([*_texts(lacking), *labels])


def slots(config: GroupConfig, bundles: Sequence[Bundle]) -> list[Slot]:
    """Return the bundles of a group with their names and labels, hardest to place first."""
    ranks = "the target" if config.tensor_parallel_size == 1 else "the target's ranks"
    names = [ranks] * len(bundles)
    names[0] = "the Router replica"
    if config.places_draft_worker:
        names[1] = f"{ranks} and the draft" if shares_gpu(config, bundles) else "the draft"
    named = map(Slot, names, bundles, label_selectors(config, bundles))

    def difficulty(slot: Slot) -> tuple[float, ...]:
        return len(slot.label_selector), slot.bundle.get("GPU", 0), slot.bundle.get("CPU", 0)

    return sorted(named, key=difficulty, reverse=True)


def pool_slot(config: GroupConfig, *, num_gpus: float) -> Slot:
    """Return what one draft worker of a pool needs on a cluster with `num_gpus` GPUs."""
    return Slot("a draft worker of the pool", pool_bundle(config, num_gpus=num_gpus), config.draft_label_selector)


def cluster_nodes() -> dict[str, Node]:
    """Return every living node with its total resources, by address and id."""
    return {_node_name(node): Node(dict(node["Resources"]), node["Labels"]) for node in _living()}


def free_nodes() -> dict[str, Node]:
    """Return every living node with its unused resources, by address and id."""
    free = available_resources_per_node()
    return {_node_name(node): Node(dict(free.get(node["NodeID"], {})), node["Labels"]) for node in _living()}


def place_groups(group: Iterable[Slot], nodes: Mapping[str, Node], *, limit: int) -> tuple[int, dict[str, Node]]:
    """Return how many groups fit on the nodes, at most `limit`, and the resources left."""
    group, free = list(group), _copy(nodes)
    for count in range(limit):
        left = _copy(free)
        if not all(_take(slot, left) for slot in group):
            return count, free
        free = left
    return limit, free


def missing(group: Iterable[Slot], nodes: Mapping[str, Node]) -> list[str]:
    """Return one sentence for each bundle of a group that does not fit."""
    free, sentences = _copy(nodes), []
    for slot in group:
        if not _take(slot, free):
            needs = ", ".join([*_texts(slot.bundle), *(f"label {n}={v}" for n, v in slot.label_selector.items())])
            shortages = [f"{name} lacks {slot.shortage(node)}" for name, node in sorted(free.items())]
            nowhere = "; ".join(shortages) or "there is no node"
            sentences.append(f"no node has room for {slot.name}, which needs {needs}: {nowhere}")
    return sentences


def _take(slot: Slot, free: dict[str, Node]) -> bool:
    """Place a bundle on the fitting node with the fewest GPUs left; return False if none fits."""
    fitting = [node for node in free.values() if not slot.shortage(node)]
    if not fitting:
        return False
    node = min(fitting, key=lambda node: node.resources.get("GPU", 0))
    for resource, amount in slot.bundle.items():
        node.resources[resource] -= amount
    return True


def _copy(nodes: Mapping[str, Node]) -> dict[str, Node]:
    return {name: Node(dict(node.resources), node.labels) for name, node in nodes.items()}


def _living() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()
    return [node for node in nodes if node["Alive"]]


def _node_name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def _texts(resources: Mapping[str, float]) -> list[str]:
    return [f"{amount:.3g} {name}" for name, amount in resources.items()]


async def wait_for_placement(config: GroupConfig, placement: PlacementGroup) -> None:
    """Wait until every bundle has its node; raise PlacementError with the reasons if some have none in time."""
    wait_s = _PLACED_BEFORE_START * config.start_timeout_s
    if await asyncio.to_thread(placement.wait, wait_s):
        return
    reasons = missing(slots(config, placement.bundle_specs), await asyncio.to_thread(free_nodes))
    reason = "; ".join(reasons) or "the nodes have room by now"
    raise PlacementError(f"the workers were not placed within {wait_s:g} s: {reason}")
