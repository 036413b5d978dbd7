"""serveConfigV2: what Serve and the application accept, and whether the worker groups have room for it."""

import itertools
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.autoscaler._private.kuberay import autoscaling_config as autoscaler
from ray.serve.schema import ServeDeploySchema

from cluster.capacity import Node, Slot, missing, place_groups, pool_slot, slots
from cluster.placement import PlacementError, label_selectors, placement_bundles
from deployments.builder import INGRESS_CPUS
from deployments.config import AppConfig, ArgumentError, PoolSize
from deployments.sections import group_config
from tests.k8s.manifests import Manifest, cluster_of, groups_of


def serve_config(service: Manifest) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


def app_config(service: Manifest) -> AppConfig:
    """Return the settings of the application in a RayService.

    Raises:
        ArgumentError: a setting does not exist or does not fit.
    """
    (application,) = serve_config(service)["applications"]
    return AppConfig.model_validate(application.get("args", {}))


def serving_problems(service: Manifest) -> Iterator[str]:
    """Yield what Serve or the application would refuse, and replicas for which there is no room."""
    raw = serve_config(service)
    try:
        parsed = ServeDeploySchema.model_validate(raw)
        config = app_config(service)
    except (ValidationError, ArgumentError, ValueError) as error:
        yield f"serveConfigV2: {error}"
        return
    # Serve ignores settings of its HTTP server that it does not know.
    yield from (f"serveConfigV2: unknown field {field}" for field in _unknown(raw, parsed))
    if raw["applications"][0]["import_path"] != "deployments:app":
        yield "serveConfigV2 does not import deployments:app"
    if config.api_key_file is None:
        yield "serveConfigV2: without api_key_file everybody may use the service"
    yield from _room_problems(service, config)


def worker_nodes(cluster: Manifest, replicas: dict[str, int]) -> dict[str, Node]:
    """Return the Ray nodes of so many pods per worker group, as Ray's autoscaler understands the groups."""
    nodes = {}
    for name, group in groups_of(cluster).items():
        if name == "head":
            continue
        resources = autoscaler._get_ray_resources_from_group_spec(group, is_head=False)
        labels = autoscaler._get_labels_from_group_spec(group, name)
        for number in range(replicas[name]):
            nodes[f"{name}-{number}"] = Node({key: float(value) for key, value in resources.items()}, labels)
    return nodes


def _room_problems(service: Manifest, config: AppConfig) -> Iterator[str]:
    cluster = cluster_of(service)
    groups = [group for name, group in groups_of(cluster).items() if name != "head"]
    sizes = {group["groupName"]: (group["minReplicas"], group["maxReplicas"]) for group in groups}
    found: list[list[Slot]] = []
    # The application is built when some of the pods have joined; which, must not matter.
    for counts in itertools.product(*(range(largest + 1) for _, largest in sizes.values())):
        nodes = worker_nodes(cluster, dict(zip(sizes, counts, strict=True)))
        group, num_gpus = group_config(config), sum(node.resources.get("GPU", 0) for node in nodes.values())
        try:
            bundles = placement_bundles(group, num_gpus=num_gpus)
            found.append(slots(group, bundles))
        except PlacementError as error:
            yield f"with {dict(zip(sizes, counts, strict=True))}: {error}"
            return
        assert label_selectors(group, bundles)
    if any(placed != found[0] for placed in found):
        yield "where workers go depends on how many pods have joined when the application is built"
    bounds, pool = config.autoscaling, config.draft_pool or PoolSize(replicas=1)
    draft = [pool_slot(group_config(config), num_gpus=1)] if config.draft_pool else []
    for bound, wanted, num_drafts in (
        (0, bounds.min_replicas, pool.replicas),
        (1, bounds.upper_bound, pool.upper_bound),
    ):
        counts = {name: size[bound] for name, size in sizes.items()}
        nodes = worker_nodes(cluster, counts)
        drafts, _ = place_groups(draft, nodes, limit=num_drafts)
        if drafts < num_drafts:
            yield f"{counts} have room for {drafts} of {num_drafts} draft workers"
        room, free = _room(found[-1], draft * num_drafts, nodes, wanted)
        if room < wanted:
            yield f"{counts} have room for {room} of {wanted} replicas: {'; '.join(missing(found[-1], free))}"
        for name in counts:
            fewer = worker_nodes(cluster, counts | {name: counts[name] - 1})
            if counts[name] and _room(found[-1], draft * num_drafts, fewer, wanted)[0] >= wanted:
                yield f"{wanted} replicas fit with one pod less than {counts[name]} in group {name}"


def _room(group: list[Slot], drafts: list[Slot], nodes: dict[str, Node], limit: int) -> tuple[int, dict[str, Node]]:
    """Return how many groups fit beside the Ingress and the draft workers of a pool, and what they leave free."""
    placed, free = place_groups([Slot("the Ingress", {"CPU": INGRESS_CPUS}, {}), *drafts], nodes, limit=1)
    return place_groups(group, free, limit=limit) if placed else (0, free)


def _unknown(raw: Any, parsed: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that a model accepts and does not know."""
    for name, value in raw.items():
        if name not in type(parsed).model_fields:
            yield f"{path}{name}"
        elif isinstance(child := getattr(parsed, name), BaseModel):
            yield from _unknown(value, child, f"{path}{name}.")
        elif isinstance(child, list) and child and isinstance(child[0], BaseModel):
            for number, (item, model) in enumerate(zip(value, child, strict=True)):
                yield from _unknown(item, model, f"{path}{name}.{number}.")
