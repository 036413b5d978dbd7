"""The variables that Serve's processes are started with."""

import os

import pytest
from ray._private import ray_constants
from ray.serve._private import constants

from deployments.environment import SERVE_ENVIRONMENT, set_serve_environment


def test_ray_or_serve_knows_each_variable() -> None:
    for name in SERVE_ENVIRONMENT:
        known = (hasattr(constants, name), hasattr(constants, name.removeprefix("RAY_SERVE_")))
        assert any(known) or name == ray_constants.RAY_WORKER_NICENESS


def test_what_the_operator_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SERVE_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_SERVE_PROXY_USE_GRPC", "0")
    set_serve_environment()
    values = {name: os.environ.pop(name) for name in SERVE_ENVIRONMENT}
    assert values == SERVE_ENVIRONMENT | {"RAY_SERVE_PROXY_USE_GRPC": "0"}
