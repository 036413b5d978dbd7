"""Which deployment a changed setting restarts, and how many replicas may start before others stop."""

import re
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from cluster.capacity import Node
from deployments import builder
from deployments.config import AppConfig, group_config
from deployments.rollout import (
    NOT_THE_INGRESSES,
    NOT_THE_ROUTERS,
    PAIR_OF_THE_INGRESSES,
    ingress_settings,
    router_settings,
    surge_percent,
)

DEPLOYMENTS = Path(builder.__file__).parent
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
        ({}, set()),
        ({"drain_timeout_s": 7.0}, set()),
        ({"autoscaling": {"max_replicas": 3}}, set()),
        ({"draft_model": "none"}, {"Router"}),
        ({"num_speculative_tokens": 2}, {"Router"}),
        ({"max_queued_requests": 9}, {"Router"}),
        ({"verify_timeout_s": 9.0}, {"Router"}),
        ({"limits": {"max_n": 3}}, {"Ingress"}),
        ({"stream_interval_s": 0.1}, {"Ingress"}),
        ({"api_keys": ["secret"]}, {"Ingress"}),
        ({"label_selector": {"target": {"pool": "big"}}}, {"Router"}),
        ({"label_selector": {"ingress": {"pool": "front"}}}, {"Ingress"}),
        ({"served_model_name": "other"}, {"Router", "Ingress"}),
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
    monkeypatch.setattr("deployments.rollout.installed_version", lambda: "next")
    after = versions(monkeypatch)
    assert all(before[name] != after[name] for name in before)


def reads(folder: str) -> tuple[set[str], set[str]]:
    """The settings that the sources of a deployment read, and those of the pair."""
    text = "\n".join(path.read_text() for path in (DEPLOYMENTS / folder).glob("*.py"))
    return set(re.findall(r"\bconfig\.(\w+)", text)), set(re.findall(r"\bpair\.(\w+)", text))


def test_no_deployment_reads_a_setting_that_is_withheld_from_it() -> None:
    assert AppConfig.model_fields.keys() >= NOT_THE_INGRESSES | NOT_THE_ROUTERS
    settings, pair = reads("ingress")
    assert settings >= {"limits", "pair"}
    assert not settings & NOT_THE_INGRESSES
    assert pair <= {*PAIR_OF_THE_INGRESSES, "target"}
    settings, _ = reads("router")
    assert settings >= {"max_recoveries"}
    assert not settings & NOT_THE_ROUTERS


def test_withheld_settings_do_not_change_what_is_read() -> None:
    config = AppConfig.model_validate(
        {"target_model": "/a", "draft_model": "/b", "max_num_seqs": 3, "round_timeout_s": 9, "stream_interval_s": 1}
        | {"label_selector": {"draft": {"pool": "small"}}, "api_keys": ["secret"], "limits": {"max_n": 2}}
    )
    router, ingress = router_settings(config), ingress_settings(config)
    assert group_config(router) == group_config(config)
    assert (router.model_name, router.round_timeout_s) == ("a", 9)
    assert (ingress.model_name, ingress.limits, ingress.stream_interval_s) == ("a", config.limits, 1)
    assert ingress.pair.target.path == "/a"
    assert router.api_keys == ingress.api_keys == ()


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
