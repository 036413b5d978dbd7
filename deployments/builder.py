"""app(config): makes the deployments, checks that the cluster has room for them, and binds Ingress to Router."""

import hashlib
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.capacity import Node, Slot, cluster_nodes, missing, place_groups, pool_slot, slots
from cluster.config import GroupConfig, suited_to_models
from cluster.placement import STRATEGY, PlacementError, label_selectors, placement_bundles, pool_options
from cluster.ray_core import this_machine
from deployments.autoscaling import autoscaling_config
from deployments.config import AppConfig, ArgumentError, PoolSize, api_keys
from deployments.ingress.draining import LAST_WORDS_S
from deployments.ingress.ingress import Ingress
from deployments.ingress.server_info import installed_version
from deployments.observe.logs import serve_logging
from deployments.ray_internals import with_version
from deployments.router.pooled_drafts import Drafts
from deployments.router.router import Router
from deployments.routing.choice import QueueDepthRouter
from deployments.sections import group_config, ingress_config, pool_config
from deployments.wire import DRAFTS
from engine.config import BUNDLED_MODELS, PairConfig
from engine.errors import ModelError
from engine.models.registry import open_model

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

STREAMS_PER_INGRESS = 10_000
HEALTH_CHECK_PERIOD_S = 2.0  # after which Serve's controller replaces a dead replica; its default is 10 s
START_TRIES = 3
"""More than one: after a restart of Serve's controller, one failed start would end the service for good."""
FAILED_CHECKS = 3  # in a row, after which Serve replaces a replica
INGRESS_CPUS = 0.1
CPUS_PER_INGRESS = 8
MAX_INGRESS_REPLICAS = 4  # by default; `num_ingress_replicas` may be larger


def app(config: AppConfig) -> Application:
    """Return the application, for a cluster that may gain nodes; raise ArgumentError if it can never start there."""
    return build(config, can_grow=True)


def build(config: AppConfig, *, can_grow: bool) -> Application:
    """Bind Ingresses to autoscaled Routers; unless the cluster `can_grow`, raise ArgumentError if it lacks room."""
    # Read here, because the processes of a running cluster do not have the caller's environment.
    keys = api_keys(config)
    group, nodes = group_config(config), _nodes()
    num_gpus = sum(node.resources.get("GPU", 0) for node in nodes.values())
    try:
        _check_models(config.pair, group, can_grow=can_grow)
        bundles = placement_bundles(group, num_gpus=num_gpus)
        selectors = label_selectors(group, bundles)
    except (ModelError, PlacementError) as error:
        raise ArgumentError(str(error)) from None
    num_cpus = sum(node.resources.get("CPU", 0) for node in nodes.values())
    affordable = min(MAX_INGRESS_REPLICAS, max(1, int(num_cpus / CPUS_PER_INGRESS)))
    num_ingress_replicas = config.num_ingress_replicas or affordable
    needs = slots(group, bundles), [pool_slot(group, num_gpus=num_gpus)]
    router_surge, ingress_surge = _check_room(config, num_ingress_replicas, *needs, nodes, can_grow=can_grow)
    log = serve_logging(config.log_format)
    watched: dict[str, Any] = {
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": config.hang_timeout_s / FAILED_CHECKS,
        "max_constructor_retry_count": START_TRIES,
        "logging_config": {**log, "enable_access_log": False},  # the Ingress logs each request
    }
    scaling = autoscaling_config(config.autoscaling)
    drain_timeout_s = config.drain_timeout_s
    if scaling is not None:
        # No stream takes longer than its request may, so a replica that autoscaling removes cuts none.
        drain_timeout_s = max(drain_timeout_s, config.limits.request_timeout_s)
    router: Any = serve.deployment(
        Router,
        name="Router",
        ray_actor_options={"num_cpus": bundles[0]["CPU"]},
        placement_group_bundles=bundles,
        placement_group_strategy=STRATEGY,
        placement_group_bundle_label_selector=selectors,
        # More than the engine admits, so that the engine refuses requests with 429 and Serve's own queue stays empty.
        max_ongoing_requests=2 * (config.pair.max_num_seqs + config.pair.max_queued_requests),
        graceful_shutdown_timeout_s=drain_timeout_s + LAST_WORDS_S,
        request_router_config=RequestRouterConfig(request_router_class=QueueDepthRouter),  # type: ignore[arg-type]
        max_surge_percent=router_surge,
        **watched,
        **({"autoscaling_config": scaling} if scaling else {"num_replicas": config.autoscaling.min_replicas}),
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=num_ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "label_selector": config.label_selector.ingress},
        max_ongoing_requests=STREAMS_PER_INGRESS,
        graceful_shutdown_timeout_s=config.drain_timeout_s + LAST_WORDS_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=START_TRIES,
        max_surge_percent=ingress_surge,
        logging_config=log,
    )
    front = ingress_config(config)
    pool = [] if config.draft_pool is None else [_draft_pool(config.draft_pool, group, num_gpus, watched)]
    # A new draft replaces only the pool: Routers then lease its new workers.
    router = with_version(router, _version(replace(group, draft=None) if pool else group))
    ingress = with_version(ingress, _version(front, keys, config.label_selector.ingress))
    application: Application = ingress.bind(front, router.bind(group, *pool), keys=keys)
    return application


def _draft_pool(settings: PoolSize, group: GroupConfig, num_gpus: float, watched: dict[str, Any]) -> Application:
    pool, scaling = pool_config(group), autoscaling_config(settings)
    drafts: Any = serve.deployment(
        Drafts,
        name=DRAFTS,
        ray_actor_options=pool_options(group, num_gpus=num_gpus),
        max_surge_percent=0,  # no text waits for a draft worker, and its GPU is seldom there twice
        **watched,
        **({"autoscaling_config": scaling} if scaling else {"num_replicas": settings.replicas}),
    )
    application: Application = with_version(drafts, _version(pool)).bind(pool)
    return application


def _check_models(pair: PairConfig, group: GroupConfig, *, can_grow: bool) -> None:
    """Raise ModelError for unusable models, before Serve tries again and again; absent models pass if `can_grow`."""
    if {pair.target_model, pair.draft_model} <= {"auto", "none", *BUNDLED_MODELS}:
        return
    target, draft = open_model(group.target), None if group.draft is None else open_model(group.draft)
    sources, are_here = [*target.parts, *(draft.drafts if draft else ())], False
    with suppress(ModelError):
        are_here = all(source.has_weights for source in sources)
    if can_grow and not are_here:
        return
    # Checks that import no torch come first.
    _ = target.tokenizer, [source.weight_shapes for source in sources if source.weight_files[0].suffix != ".gguf"]
    suited_to_models(group, target, draft)
    from engine.drafting.assembly import check_files

    check_files(target, draft, group.tensor_parallel_size)


def _version(*arguments: object) -> str:
    """Return a digest of a deployment's arguments and this package; a model's new files do not change it."""
    return hashlib.sha256(repr((*arguments, installed_version())).encode()).hexdigest()


def surge_percent(num_replicas: int, room: int) -> int:
    """Return the percentage of replicas that Serve may start before it stops old ones, within `room`."""
    # Serve takes the percentage of the present replicas and rounds up; together they never exceed `room`.
    return min(100, max(0, 100 * (room - num_replicas) // num_replicas))


def _check_room(
    config: AppConfig, num_ingress: int, group: list[Slot], draft: list[Slot], nodes: dict[str, Node], *, can_grow: bool
) -> tuple[int, int]:
    """Return the surge percentages of Routers and Ingresses; report replicas without room."""
    ingress = [Slot("an Ingress replica", {"CPU": INGRESS_CPUS}, config.label_selector.ingress)]
    num_drafts, bounds = 0 if config.draft_pool is None else config.draft_pool.replicas, config.autoscaling
    room, left = 0, nodes
    for setting, slots_of_one, most, least in (
        ("num_ingress_replicas", ingress, num_ingress, num_ingress),
        ("draft_pool.replicas", draft, num_drafts, num_drafts),
        ("autoscaling.max_replicas", group, bounds.upper_bound, bounds.min_replicas),
    ):
        room, left = place_groups(slots_of_one, left, limit=most)
        if room < most:
            named, number = (setting, most) if room >= least else (setting.replace("max_", "min_"), least)
            shortages = "; ".join(missing(slots_of_one, left))
            message = f"{named} is {number}, but the cluster has room for {room}: {shortages}"
            if room < least and not can_grow:
                raise ArgumentError(message)
            logger.warning("%s; %s", message, "the others wait for more nodes" if can_grow else "no more will start")
    _, left = place_groups(draft, nodes, limit=num_drafts)
    num_placed, left = place_groups(ingress, left, limit=2 * num_ingress)
    room_beside, _ = place_groups(group, left, limit=2 * bounds.upper_bound)
    has_room_for_two = num_placed == 2 * num_ingress and room_beside >= room
    return surge_percent(bounds.upper_bound, room_beside), 100 if has_room_for_two else 0


def _nodes() -> dict[str, Node]:
    if ray.is_initialized():
        return cluster_nodes()
    return {"this machine": Node(*this_machine())}
