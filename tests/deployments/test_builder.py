"""The deployments of the application, what is refused, and which of them a changed setting restarts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from cluster.capacity import Node
from deployments import builder
from deployments.builder import surge_percent
from deployments.config import AppConfig, ArgumentError
from deployments.ingress.draining import LAST_WORDS_S
from deployments.wire import DRAFTS
from engine.config import BUNDLED_DRAFT, BUNDLED_HEAD, BUNDLED_TARGET

LAPTOP = {"a": Node({"CPU": 16.0})}
POOLED: dict[str, Any] = {"draft_pool": {"replicas": 2}}

Build = Callable[..., SimpleNamespace]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Returns the Ingress, the Router and, if there is a pool, the Drafts of an application on these nodes."""

    def build(nodes: dict[str, Node] | float = LAPTOP, *, can_grow: bool = True, **arguments: Any) -> SimpleNamespace:
        nodes = nodes if isinstance(nodes, dict) else {"a": Node({"CPU": nodes})}
        monkeypatch.setattr(builder, "_nodes", lambda: nodes)
        ingress: Any = builder.build(AppConfig.model_validate(arguments), can_grow=can_grow)._bound_deployment
        router = ingress.init_args[1]._bound_deployment
        drafts = [pool._bound_deployment for pool in router.init_args[1:]]
        return SimpleNamespace(ingress=ingress, router=router, drafts=drafts[0] if drafts else None)

    return build


def test_replicas_are_fixed_or_follow_the_load(build: Build) -> None:
    assert build(autoscaling={"min_replicas": 2}).router.num_replicas == 2
    scaled = build(autoscaling={"max_replicas": 4}).router._deployment_config.autoscaling_config
    assert scaled.max_replicas == 4
    scaled = build(draft_pool={"replicas": 1, "max_replicas": 3}).drafts._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (1, 3)
    assert scaled.policy.get_policy().__name__ == "UtilisationPolicy"


@pytest.mark.parametrize(
    ("scaling", "router_s"), [({}, 7.0), ({"max_replicas": 4}, AppConfig().limits.request_timeout_s)]
)
def test_streams_have_the_drain_timeout_to_finish_and_none_is_cut_by_autoscaling(
    scaling: dict[str, int], router_s: float, build: Build
) -> None:
    built = build(drain_timeout_s=7.0, autoscaling=scaling)
    assert built.router._deployment_config.graceful_shutdown_timeout_s == router_s + LAST_WORDS_S
    assert built.ingress._deployment_config.graceful_shutdown_timeout_s == 7.0 + LAST_WORDS_S


@pytest.mark.parametrize(
    ("num_cpus", "routers", "ingresses"), [(0.8, 0, 0), (0.9, 0, 100), (1.5, 0, 100), (1.6, 100, 100)]
)
def test_new_replicas_start_before_old_ones_stop_where_there_is_room(
    num_cpus: float, routers: int, ingresses: int, build: Build
) -> None:
    """An Ingress takes 0.1 CPU and a group 0.7."""
    built = build(num_cpus)
    assert built.router._deployment_config.max_surge_percent == routers
    assert built.ingress._deployment_config.max_surge_percent == ingresses


def test_the_ingress_gets_the_keys_of_this_process(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    assert build().ingress.init_kwargs["keys"] == ("secret",)


def test_labels_go_to_serve_bundle_by_bundle(build: Build) -> None:
    labels = {"target": {"pool": "big"}, "draft": {"pool": "small"}, "ingress": {"pool": "front"}}
    built = build(label_selector=labels)
    selectors = built.router._replica_config.placement_group_bundle_label_selector
    assert selectors == [{"pool": "big"}, {"pool": "small"}, {"pool": "big"}]
    assert built.ingress._replica_config.ray_actor_options["label_selector"] == {"pool": "front"}


SCALED = {"autoscaling": {"min_replicas": 2, "max_replicas": 4}}
FRONT = {"label_selector": {"ingress": {"pool": "front"}}}


@pytest.mark.parametrize(
    ("nodes", "arguments", "message", "is_fatal"),
    [
        (LAPTOP, FRONT, "no node has room for an Ingress replica, which needs 0.1 CPU, label pool=front", True),
        (2.6, SCALED, "autoscaling.max_replicas is 4, but the cluster has room for 3: no node has room for", False),
        (1.0, SCALED, "autoscaling.min_replicas is 2, but the cluster has room for 1: no node", True),
        (1.0, {"num_ingress_replicas": 20}, "num_ingress_replicas is 20, but the cluster has room for 10: no", True),
        # A group has 0.5 CPU, an Ingress 0.1 and a draft worker 0.2, which the groups do not take.
        (0.7, {"draft_pool": {"replicas": 4}}, "draft_pool.replicas is 4, but the cluster has room for 3: no", True),
        (0.9, {"draft_pool": {"replicas": 4}}, "autoscaling.min_replicas is 1, but the cluster has room for 0", True),
    ],
)
def test_replicas_without_room_are_refused_where_no_node_can_join_and_else_warned_of(
    nodes: Any,
    arguments: dict[str, Any],
    message: str,
    is_fatal: bool,
    build: Build,
    caplog: pytest.LogCaptureFixture,
) -> None:
    build(nodes, **arguments)
    assert message in caplog.text
    assert "the others wait for more nodes" in caplog.text
    caplog.clear()
    if is_fatal:
        with pytest.raises(ArgumentError, match=message):
            build(nodes, can_grow=False, **arguments)
    else:
        build(nodes, can_grow=False, **arguments)
        assert message in caplog.text


def test_replicas_that_have_room_are_not_reported(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    build({"a": Node({"CPU": 16.0}), "b": Node({"CPU": 1.0}, {"pool": "front"})}, can_grow=False, **FRONT)
    assert "no node has room" not in caplog.text
    with pytest.raises(ArgumentError, match="the target needs 4 GPUs, but the cluster has 2"):
        build({"a": Node({"CPU": 16.0, "GPU": 2.0})}, tensor_parallel_size=4)


@pytest.mark.parametrize(("num_cpus", "num_replicas"), [(0.5, 1), (15, 1), (16, 2), (1000, 4)])
def test_ingress_replicas_follow_the_cpus_or_are_a_setting(num_cpus: float, num_replicas: int, build: Build) -> None:
    nodes = {"a": Node({"CPU": num_cpus / 2}), "b": Node({"CPU": num_cpus / 2})}
    assert build(nodes).ingress.num_replicas == num_replicas
    assert build(nodes, num_ingress_replicas=3).ingress.num_replicas == 3


def test_requests_go_to_the_router_with_the_shorter_queue(build: Build) -> None:
    chosen = build().router._deployment_config.request_router_config.get_request_router_class()
    assert chosen.__name__ == "QueueDepthRouter"


def test_routers_get_the_pool_that_drafts_for_them(build: Build) -> None:
    labels = {"target": {"pool": "big"}, "draft": {"pool": "small"}}
    nodes = {
        "a": Node({"CPU": 16.0, "GPU": 4.0}, {"pool": "big"}),
        "b": Node({"CPU": 4.0, "GPU": 2.0}, {"pool": "small"}),
    }
    built = build(nodes, tensor_parallel_size=4, label_selector=labels, **POOLED)
    router, drafts = built.router, built.drafts
    assert [bundle.get("GPU", 0) for bundle in router._replica_config.placement_group_bundles] == [0, 4]
    assert router._replica_config.placement_group_bundle_label_selector == [{"pool": "big"}] * 2
    assert (drafts.name, drafts.num_replicas) == (DRAFTS, 2)
    options = drafts._replica_config.ray_actor_options
    assert (options["num_gpus"], options["label_selector"]) == (1, {"pool": "small"})
    (pool,) = drafts.init_args
    assert (pool.draft_pool, pool.draft) == (True, router.init_args[0].draft)
    assert router.init_args[0].draft_pool
    assert build().drafts is None


SERVES_OWN = "of the application"
PAIR = {"target_model": "/models/target", "draft_model": "/models/draft"}


def versions(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> dict[str, str]:
    """The version of each deployment as Serve's controller receives it from a config file."""
    monkeypatch.setattr(builder, "_nodes", lambda: LAPTOP)
    built = build_app(builder.app(AppConfig.model_validate(arguments)), name="default")
    received = {}
    for deployment in built.deployments:
        config = deployment._deployment_config
        config.version = SERVES_OWN
        received[deployment.name] = config.to_proto().version
        assert deployment._version == received[deployment.name] != SERVES_OWN
    return received


@pytest.mark.parametrize(
    ("before", "changed", "restarted"),
    [
        ({}, {}, set()),
        ({}, {"drain_timeout_s": 7.0, "autoscaling": {"max_replicas": 3}}, set()),
        ({}, {"label_selector": {"target": {"pool": "big"}}}, {"Router"}),
        ({}, {"label_selector": {"ingress": {"pool": "front"}}}, {"Ingress"}),
        ({}, {"api_keys": ["secret"]}, {"Ingress"}),
        ({}, {"target_model": "/models/other"}, {"Router", "Ingress"}),
        ({}, POOLED, {"Router", "Ingress"}),  # an Ingress asks the pool for its metrics
        (PAIR | POOLED, {"draft_pool": {"replicas": 1, "max_replicas": 2}}, set()),
        (PAIR | POOLED, {"draft_quantization": "int8"}, {"Drafts"}),
        (PAIR | POOLED, {"label_selector": {"draft": {"pool": "small"}}}, {"Drafts", "Router"}),
        (PAIR | POOLED, {"tensor_parallel_size": 2}, {"Router", "Ingress"}),
        (PAIR | POOLED, {"round_timeout_s": 9.0}, {"Router"}),
        (PAIR | POOLED, {"target_model": "/models/other"}, {"Drafts", "Router", "Ingress"}),
        (PAIR | POOLED, {"num_speculative_tokens": 2}, {"Drafts", "Router"}),
        (PAIR | POOLED, {"limits": {"max_n": 3}}, {"Ingress"}),
    ],
)
def test_a_changed_setting_restarts_what_reads_it(
    before: dict[str, Any], changed: dict[str, Any], restarted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = versions(monkeypatch, before), versions(monkeypatch, before | changed)
    assert {name for name in old if old[name] != new[name]} == restarted


def test_the_package_version_restarts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions(monkeypatch, POOLED)
    monkeypatch.setattr("deployments.builder.installed_version", lambda: "next")
    after = versions(monkeypatch, POOLED)
    assert before.keys() == {"Drafts", "Router", "Ingress"}
    assert all(before[name] != after[name] for name in before)


@pytest.mark.parametrize(
    ("num_replicas", "room", "expected"),
    [(1, 1, 0), (1, 9, 100), (4, 5, 25), (3, 4, 33), (3, 2, 0)],
)
def test_replicas_surge_as_far_as_there_is_room(num_replicas: int, room: int, expected: int) -> None:
    assert surge_percent(num_replicas, room) == expected
    surge = (expected * num_replicas + 99) // 100  # as Serve computes it
    assert num_replicas + surge <= max(room, num_replicas)


def test_models_that_no_replica_could_load_are_refused_before_any_starts(tmp_path: Path, build: Build) -> None:
    def refusal(**arguments: Any) -> str:
        try:
            build(**{"target_model": str(target), "draft_model": "none"} | arguments)
        except ArgumentError as error:
            return str(error)
        return ""

    target = shutil.copytree(BUNDLED_TARGET, tmp_path / "target")
    assert refusal() == refusal(draft_model=str(BUNDLED_DRAFT)) == refusal(draft_model=str(BUNDLED_HEAD)) == ""
    assert "has 6 attention heads, not divisible by tensor_parallel_size 4" in refusal(tensor_parallel_size=4)
    draft = shutil.copytree(BUNDLED_DRAFT, tmp_path / "draft")
    (draft / "model.safetensors").write_bytes(b"")
    assert f"cannot read {draft / 'model.safetensors'}" in refusal(draft_model=str(draft))
    (target / "chat_template.jinja").write_text("{% if a %}")
    assert "chat_template.jinja): TemplateSyntaxError: Unexpected end of template" in refusal()
    (target / "chat_template.jinja").write_text(
        "{% for a in b %}{% break %}{% endfor %}{% generation %}{% endgeneration %}"
    )
    assert refusal() == ""
    (target / "tokenizer.json").write_text("{")
    assert f"cannot read the tokenizer of {target}" in refusal()
    assert refusal(target_model="/of/another/node") == ""
