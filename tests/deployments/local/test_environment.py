"""The variables that Serve's processes are started with."""

import os

import pytest
from ray._private import ray_constants
from ray.serve._private import constants

from deployments.config import AppConfig
from deployments.local.environment import SERVE_ENVIRONMENT, serve_environment, set_serve_environment


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set, and what a test sets is gone after it."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "SERVE" not in name})


def test_ray_or_serve_knows_each_variable() -> None:
    for name in SERVE_ENVIRONMENT:
        known = (hasattr(constants, name), hasattr(constants, name.removeprefix("RAY_SERVE_")))
        assert any(known) or name == ray_constants.RAY_WORKER_NICENESS


def test_what_the_operator_has_set_is_kept() -> None:
    os.environ["RAY_SERVE_PROXY_USE_GRPC"] = "0"
    set_serve_environment(AppConfig())
    assert os.environ["RAY_SERVE_PROXY_USE_GRPC"] == "0"
    assert {name: os.environ[name] for name in SERVE_ENVIRONMENT} == {
        **SERVE_ENVIRONMENT,
        "RAY_SERVE_PROXY_USE_GRPC": "0",
    }


def test_an_operator_can_do_without_haproxy() -> None:
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    assert serve_environment(AppConfig()) == SERVE_ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
