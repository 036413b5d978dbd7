"""What binds Ray and Serve to 127.0.0.1; `tests/e2e/test_cli.py` looks at the ports of a real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private import replica

from deployments import loopback


@pytest.mark.parametrize(("address", "bound"), [("127.0.0.1", "127.0.0.1:0"), ("10.0.0.7", "[::]:0")])
def test_a_replica_is_bound_as_its_node_is(address: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, str]] = []

    def bind(server: object, where: str) -> int:
        calls.append((server, where))
        return 5

    monkeypatch.setattr(replica, "add_port_to_grpc_server", bind)  # which Serve must still call by this name
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: address)
    loopback.bind_replica()
    assert replica.add_port_to_grpc_server("server", "[::]:0") == 5
    assert calls == [("server", bound)]


@pytest.mark.parametrize(("given", "is_local"), [(None, True), ("1", False)], ids=["default", "by an operator"])
def test_ray_takes_the_loopback_address_unless_told_otherwise(given: str | None, is_local: bool) -> None:
    code = (
        "import sys; sys.argv = ['x', '--help']; import deployments.__main__;"
        "from ray._private.services import get_node_ip_address; print(get_node_ip_address())"
    )
    variables = {name: value for name, value in os.environ.items() if name != loopback.VARIABLE}
    if given is not None:
        variables[loopback.VARIABLE] = given
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    output = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert (output.stdout.split()[-1] == loopback.LOOPBACK) == is_local
