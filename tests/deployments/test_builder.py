"""The deployments of the application, what is refused, and which of them a changed setting restarts."""

import shutil
from pathlib import Path
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


def deployments(config: AppConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The Ingress and the Router that an application is made of."""
    monkeypatch.setattr(builder, "_nodes", lambda: LAPTOP)
    bound: Any = builder.app(config)._bound_deployment
    return bound, bound.init_args[1]._bound_deployment


def pool_of(nodes: dict[str, Node], monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[Any, Any]:
    """The Router and the draft pool of an application on these nodes."""
    monkeypatch.setattr(builder, "_nodes", lambda: nodes)
    ingress: Any = builder.app(AppConfig.model_validate(POOLED | arguments))._bound_deployment
    router = ingress.init_args[1]._bound_deployment
    return router, router.init_args[1]._bound_deployment


def test_serves_own_queue_is_longer_than_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    _, router = deployments(AppConfig(max_num_seqs=3, max_queued_requests=5), monkeypatch)
    assert router.max_ongoing_requests > 3 + 5


def test_replicas_are_fixed_or_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fixed = deployments(AppConfig(autoscaling={"min_replicas": 2}), monkeypatch)  # type: ignore[arg-type]
    assert fixed.num_replicas == 2
    _, scaled = deployments(AppConfig(autoscaling={"min_replicas": 1, "max_replicas": 4}), monkeypatch)  # type: ignore[arg-type]
    assert scaled._deployment_config.autoscaling_config.max_replicas == 4


def test_running_streams_have_the_drain_timeout_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    for deployment in deployments(AppConfig(drain_timeout_s=7.0), monkeypatch):
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 7.0 + LAST_WORDS_S


@pytest.mark.parametrize(
    ("num_cpus", "routers", "ingresses"), [(0.8, 0, 0), (0.9, 0, 100), (1.5, 0, 100), (1.6, 100, 100)]
)
def test_new_replicas_start_before_old_ones_stop_where_there_is_room(
    num_cpus: float, routers: int, ingresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Ingress takes 0.1 CPU and a group 0.7."""
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": num_cpus})})
    ingress: Any = builder.app(AppConfig())._bound_deployment
    router = ingress.init_args[1]._bound_deployment
    assert router._deployment_config.max_surge_percent == routers
    assert ingress._deployment_config.max_surge_percent == ingresses


def test_the_ingress_gets_the_keys_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    ingress, _ = deployments(AppConfig(), monkeypatch)
    assert ingress.init_kwargs["keys"] == ("secret",)


def test_a_cluster_that_cannot_hold_the_workers_is_an_argument_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 16.0, "GPU": 2.0})})
    with pytest.raises(ArgumentError, match="the target needs 4 GPUs, but the cluster has 2"):
        builder.app(AppConfig(tensor_parallel_size=4))


SCALED = AppConfig(autoscaling={"min_replicas": 2, "max_replicas": 4})  # type: ignore[arg-type]


def test_labels_go_to_serve_bundle_by_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = {"target": {"pool": "big"}, "draft": {"pool": "small"}, "ingress": {"pool": "front"}}
    ingress, router = deployments(AppConfig.model_validate({"label_selector": selector}), monkeypatch)
    selectors = router._replica_config.placement_group_bundle_label_selector
    assert selectors == [{"pool": "big"}, {"pool": "small"}, {"pool": "big"}]
    assert ingress._replica_config.ray_actor_options["label_selector"] == {"pool": "front"}


def test_an_ingress_without_a_node_of_its_labels_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = AppConfig.model_validate({"label_selector": {"ingress": {"pool": "front"}}})
    deployments(config, monkeypatch)
    assert "no node has room for an Ingress replica, which needs 0.1 CPU, label pool=front" in caplog.text
    caplog.clear()
    nodes = {"a": Node({"CPU": 16.0}), "b": Node({"CPU": 1.0}, {"pool": "front"})}
    monkeypatch.setattr(builder, "_nodes", lambda: nodes)
    builder.app(config)
    assert "no node has room" not in caplog.text


def test_more_replicas_than_the_cluster_has_room_for_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 2.6})})
    builder.build(SCALED, can_grow=False)
    assert "autoscaling.max_replicas is 4, but the cluster has room for 3" in caplog.text
    assert "no node has room for the draft, which needs 0.2 CPU: a lacks 0.2 CPU" in caplog.text


@pytest.mark.parametrize(("num_cpus", "num_replicas"), [(0.5, 1), (2, 1), (15, 1), (16, 2), (24, 3), (1000, 4)])
def test_ingress_replicas_follow_the_cpus(num_cpus: float, num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": num_cpus / 2}), "b": Node({"CPU": num_cpus / 2})})
    ingress: Any = builder.app(AppConfig())._bound_deployment
    assert ingress.num_replicas == num_replicas


def test_ingress_replicas_are_a_setting_and_need_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ingress, _ = deployments(AppConfig(num_ingress_replicas=3), monkeypatch)
    assert ingress.num_replicas == 3
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 1.0})})
    message = "num_ingress_replicas is 20, but the cluster has room for 10: no node has room for an Ingress replica"
    with pytest.raises(ArgumentError, match=message):
        builder.build(AppConfig(num_ingress_replicas=20), can_grow=False)
    builder.app(AppConfig(num_ingress_replicas=20))
    assert message in caplog.text


def test_requests_go_to_the_router_with_the_shorter_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    _, router = deployments(AppConfig(), monkeypatch)
    chosen = router._deployment_config.request_router_config.get_request_router_class()
    assert chosen.__name__ == "QueueDepthRouter"


def test_fewer_replicas_than_the_minimum_are_refused_where_no_node_can_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 1.0})})
    with pytest.raises(ArgumentError, match=r"autoscaling.min_replicas is 2, but the cluster has room for 1: no node"):
        builder.build(SCALED, can_grow=False)
    builder.app(SCALED)
    assert "autoscaling.min_replicas is 2, but the cluster has room for 1" in caplog.text


def test_a_replica_that_autoscaling_removes_drains_for_as_long_as_a_request_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, router = deployments(AppConfig(autoscaling={"max_replicas": 4}, drain_timeout_s=7.0), monkeypatch)  # type: ignore[arg-type]
    timeout_s = router._deployment_config.graceful_shutdown_timeout_s
    assert timeout_s == AppConfig().limits.request_timeout_s + LAST_WORDS_S


def test_routers_get_the_pool_that_drafts_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"label_selector": {"target": {"pool": "big"}, "draft": {"pool": "small"}}}
    nodes = {
        "a": Node({"CPU": 16.0, "GPU": 4.0}, {"pool": "big"}),
        "b": Node({"CPU": 4.0, "GPU": 2.0}, {"pool": "small"}),
    }
    router, drafts = pool_of(nodes, monkeypatch, tensor_parallel_size=4, **labels)
    assert [bundle.get("GPU", 0) for bundle in router._replica_config.placement_group_bundles] == [0, 4]
    assert router._replica_config.placement_group_bundle_label_selector == [{"pool": "big"}] * 2
    assert (drafts.name, drafts.num_replicas) == (DRAFTS, 2)
    options = drafts._replica_config.ray_actor_options
    assert (options["num_gpus"], options["label_selector"]) == (1, {"pool": "small"})
    (pool,) = drafts.init_args
    assert (pool.draft_pool, pool.draft) == (True, router.init_args[0].draft)
    assert router.init_args[0].draft_pool
    _, alone = deployments(AppConfig(), monkeypatch)
    assert len(alone.init_args) == 1


def test_draft_workers_are_fixed_or_follow_their_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drafts = pool_of(LAPTOP, monkeypatch, draft_pool={"replicas": 1, "max_replicas": 3})
    scaling = drafts._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.policy.get_policy().__name__ == "UtilisationPolicy"


def test_a_cluster_without_room_for_the_pool_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group has 0.5 CPU, an Ingress 0.1 and a draft worker 0.2, which the groups do not take."""
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 0.7})})
    config = AppConfig.model_validate(POOLED | {"draft_pool": {"replicas": 4}})
    message = (
        "draft_pool.replicas is 4, but the cluster has room for 3: no node has room for a draft worker of the pool"
    )
    with pytest.raises(ArgumentError, match=message):
        builder.build(config, can_grow=False)
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 0.9})})
    with pytest.raises(ArgumentError, match=r"autoscaling.min_replicas is 1, but the cluster has room for 0"):
        builder.build(config, can_grow=False)
    pool_of({"a": Node({"CPU": 0.9})}, monkeypatch, draft_pool={"replicas": 5})
    assert "draft_pool.replicas is 5, but the cluster has room for 4" in caplog.text
    assert "the others wait for more nodes" in caplog.text


@pytest.mark.parametrize(("num_gpus", "percent"), [(3, 0), (4, 100)])
def test_the_gpus_of_the_pool_are_no_room_for_a_second_group(
    num_gpus: int, percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, _ = pool_of({"a": Node({"CPU": 64.0, "GPU": float(num_gpus)})}, monkeypatch)
    assert router._deployment_config.max_surge_percent == percent


SERVES_OWN = "of the application"


def versions(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, str]:
    """The version of each deployment as Serve's controller receives it from a config file."""
    monkeypatch.setattr(builder, "_nodes", lambda: {"a": Node({"CPU": 16.0})})
    built = build_app(builder.app(AppConfig.model_validate(arguments)), name="default")
    received = {}
    for deployment in built.deployments:
        config = deployment._deployment_config
        config.version = SERVES_OWN
        received[deployment.name] = config.to_proto().version
        assert deployment._version == received[deployment.name] != SERVES_OWN
    return received


@pytest.mark.parametrize(
    ("arguments", "restarted"),
    [
        ({"draft_pool": {"replicas": 1, "max_replicas": 2}}, set()),
        ({"draft_model": "/models/other"}, {"Drafts"}),
        ({"draft_quantization": "int8"}, {"Drafts"}),
        ({"label_selector": {"draft": {"pool": "small"}}}, {"Drafts", "Router"}),
        ({"target_quantization": "int8"}, {"Router", "Ingress"}),
        ({"tensor_parallel_size": 2}, {"Router", "Ingress"}),
        ({"round_timeout_s": 9.0}, {"Router"}),
        ({"target_model": "/models/other"}, {"Drafts", "Router", "Ingress"}),
        ({"num_speculative_tokens": 2}, {"Drafts", "Router"}),
        ({"limits": {"max_n": 3}}, {"Ingress"}),
    ],
    ids=lambda value: " and ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_changed_setting_restarts_of_the_pool_what_reads_it(
    arguments: dict[str, Any], restarted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = {"target_model": "/models/target", "draft_model": "/models/draft"}
    before, after = versions(monkeypatch, **pair | POOLED), versions(monkeypatch, **pair | POOLED | arguments)
    assert before.keys() == {"Drafts", "Router", "Ingress"}
    assert {name for name in before if before[name] != after[name]} == restarted


def test_a_pool_instead_of_own_drafts_replaces_routers_and_ingresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ingress asks the pool for its metrics."""
    before, after = versions(monkeypatch), versions(monkeypatch, **POOLED)
    assert {name for name in before if before[name] != after[name]} == {"Router", "Ingress"}


@pytest.mark.parametrize(
    ("arguments", "restarted"),
    [
        ({}, set()),
        ({"drain_timeout_s": 7.0}, set()),
        ({"autoscaling": {"max_replicas": 3}}, set()),
        ({"draft_model": "none"}, {"Router"}),
        ({"num_speculative_tokens": 2}, {"Router"}),
        ({"round_timeout_s": 9.0}, {"Router"}),
        ({"limits": {"max_n": 3}}, {"Ingress"}),
        ({"api_keys": ["secret"]}, {"Ingress"}),
        ({"label_selector": {"target": {"pool": "big"}}}, {"Router"}),
        ({"label_selector": {"ingress": {"pool": "front"}}}, {"Ingress"}),
        ({"target_model": "/models/other"}, {"Router", "Ingress"}),
    ],
    ids=lambda value: " and ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_changed_setting_restarts_those_that_read_it(
    arguments: dict[str, Any], restarted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = versions(monkeypatch), versions(monkeypatch, **arguments)
    assert {name for name in before if before[name] != after[name]} == restarted


def test_the_package_version_restarts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions(monkeypatch)
    monkeypatch.setattr("deployments.builder.installed_version", lambda: "next")
    after = versions(monkeypatch)
    assert all(before[name] != after[name] for name in before)


@pytest.mark.parametrize(
    ("num_replicas", "room", "expected"),
    [(1, 1, 0), (1, 2, 100), (1, 9, 100), (4, 5, 25), (3, 4, 33), (3, 2, 0), (300, 301, 0)],
)
def test_replicas_surge_as_far_as_there_is_room(num_replicas: int, room: int, expected: int) -> None:
    assert surge_percent(num_replicas, room) == expected


def test_no_number_of_replicas_outgrows_the_room() -> None:
    for most in range(1, 13):
        for room in range(1, 30):
            percent = surge_percent(most, room)
            for replicas in range(1, most + 1):
                surge = (percent * replicas + 99) // 100  # as Serve computes it
                assert replicas + surge <= max(room, most)


def test_models_that_no_replica_could_load_are_refused_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(**arguments: Any) -> str:
        try:
            deployments(
                AppConfig.model_validate({"target_model": str(target), "draft_model": "none"} | arguments), monkeypatch
            )
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
