"""Ray's private parts are those of the version they were checked with, and no other module uses any."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.worker import global_worker
from ray.serve._private import replica

from cluster.ray_core import CHECKED_RAY
from deployments.ray_internals import bind_replica, shutdown_timeout_s
from tests.test_layering import FORBIDDEN, ROOT, imported_names, source_files

MODULES = {Path("deployments/ray_internals.py"), Path("cluster/ray_core.py")}


def test_ray_is_the_version_whose_private_parts_were_checked() -> None:
    installed = ray.__version__.rpartition(".")[0]
    assert installed == CHECKED_RAY, (
        f"Ray {ray.__version__} is installed, but the private parts in {' and '.join(map(str, sorted(MODULES)))} were "
        f"checked with Ray {CHECKED_RAY}: compare each with the new version, run the rollout and fault tests, and "
        "change CHECKED_RAY"
    )


def test_no_other_module_imports_from_rays_private_modules() -> None:
    offences = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in FORBIDDEN
        for path in source_files(package)
        for name in imported_names(path)
        if name.startswith("ray.") and "._" in name and path.relative_to(ROOT) not in MODULES
    ]
    assert offences == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_stopped_replica_has_the_timeout_of_its_deployment(monkeypatch: pytest.MonkeyPatch, is_stopped: bool) -> None:
    assert shutdown_timeout_s() is None
    config = SimpleNamespace(graceful_shutdown_timeout_s=7)
    stopping: Any = SimpleNamespace(_shutting_down=is_stopped, _deployment_config=config)
    actors = {"other": SimpleNamespace(), "starting": SimpleNamespace(_replica_impl=None)}
    monkeypatch.setattr(global_worker, "actors", actors | {"id": SimpleNamespace(_replica_impl=stopping)})
    assert shutdown_timeout_s() == (7.0 if is_stopped else None)


@pytest.mark.parametrize(("address", "bound"), [("127.0.0.1", "127.0.0.1:0"), ("10.0.0.7", "[::]:0")])
def test_a_replica_is_bound_as_its_node_is(address: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, str]] = []

    def bind(server: object, where: str) -> int:
        calls.append((server, where))
        return 5

    monkeypatch.setattr(replica, "add_port_to_grpc_server", bind)  # which Serve must still call by this name
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: address)
    bind_replica()
    assert replica.add_port_to_grpc_server("server", "[::]:0") == 5
    assert calls == [("server", bound)]
