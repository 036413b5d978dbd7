"""Whether the replica of this process has been stopped, from Serve's own state."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.worker import global_worker

from deployments.router.stopping import stopped_replica


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_replica_is_found_once_it_has_been_stopped(monkeypatch: pytest.MonkeyPatch, is_stopped: bool) -> None:
    assert stopped_replica() is None
    replica: Any = SimpleNamespace(_shutting_down=is_stopped)
    actors = {"other": SimpleNamespace(), "starting": SimpleNamespace(_replica_impl=None)}
    monkeypatch.setattr(global_worker, "actors", actors | {"id": SimpleNamespace(_replica_impl=replica)})
    assert stopped_replica() is (replica if is_stopped else None)
