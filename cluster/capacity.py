"""Capacity: how many groups the nodes of a cluster can hold, and which bundle is missing what if one does not fit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, Bundle

Resources = dict[str, float]
_EPSILON = 1e-6


def cluster_nodes() -> dict[str, Resources]:
    """Return the total resources of every living node of Ray's cluster, by its address and id."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": dict(node["Resources"])
        for node in nodes
        if node["Alive"]
    }


def place_groups(
    bundles: Sequence[Bundle], nodes: Mapping[str, Resources], *, limit: int
) -> tuple[int, dict[str, Resources]]:
    """Return how many groups of these bundles fit on the nodes, at most `limit`, and what they leave free."""
    free = _copy(nodes)
    for count in range(limit):
        left = _copy(free)
        if any(_take(bundle, left) is None for _, bundle in _demanding_first(bundles)):
            return count, free
        free = left
    return limit, free


def missing(config: GroupConfig, bundles: Sequence[Bundle], nodes: Mapping[str, Resources]) -> list[str]:
    """Return one sentence for each bundle of a group that finds no room beside those placed before it.

    Args:
        nodes: what each node has free.
    """
    free, sentences = _copy(nodes), []
    for index, bundle in _demanding_first(bundles):
        if _take(bundle, free) is None:
            shortages = [f"{name} lacks {_shortage(bundle, node)}" for name, node in sorted(free.items())]
            sentences.append(
                f"no node has room for {bundle_name(config, index)}, which needs {_show(bundle)}: "
                + ("; ".join(shortages) or "there is no node")
            )
    return sentences


def bundle_name(config: GroupConfig, index: int) -> str:
    """Return what a bundle of a group is for."""
    if index == 0:
        return "the Router replica"
    if config.has_draft_worker:
        if index == DRAFT_BUNDLE:
            return "the draft"
        index -= 1
    return "the target" if config.tensor_parallel_size == 1 else f"target rank {index - 1}"


def _demanding_first(bundles: Sequence[Bundle]) -> Iterator[tuple[int, Bundle]]:
    """Yield bundles with their indices: those with accelerator types first, then by their GPUs and CPUs."""
    order = sorted(enumerate(bundles), key=lambda item: (len(item[1]), item[1].get("GPU", 0), item[1].get("CPU", 0)))
    return reversed(order)


def _copy(nodes: Mapping[str, Resources]) -> dict[str, Resources]:
    return {name: dict(resources) for name, resources in nodes.items()}


def _take(bundle: Bundle, free: dict[str, Resources]) -> str | None:
    """Take a bundle's resources from the node with the fewest GPUs left among those that have them."""
    fitting = [name for name, node in free.items() if all(node.get(r, 0) + _EPSILON >= n for r, n in bundle.items())]
    if not fitting:
        return None
    chosen = min(fitting, key=lambda name: free[name].get("GPU", 0))
    for resource, amount in bundle.items():
        free[chosen][resource] -= amount
    return chosen


def _shortage(bundle: Bundle, node: Resources) -> str:
    return _show({name: n - node.get(name, 0) for name, n in bundle.items() if node.get(name, 0) + _EPSILON < n})


def _show(resources: Mapping[str, float]) -> str:
    return ", ".join(name if ":" in name else f"{amount:.3g} {name}" for name, amount in resources.items())
