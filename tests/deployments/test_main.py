"""Ray's ports are bound to 127.0.0.1; `tests/e2e/test_cli.py` looks at the ports of a real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.mark.parametrize(("given", "is_local"), [(None, True), ("1", False)], ids=["default", "by an operator"])
def test_ray_takes_the_loopback_address_unless_told_otherwise(given: str | None, is_local: bool) -> None:
    code = (
        "import atexit, runpy, sys; sys.argv = ['x', 'wrong'];"
        "told = lambda: print(sys.modules['ray._private.services'].get_node_ip_address()); atexit.register(told);"
        "runpy.run_module('deployments', run_name='__main__')"
    )
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if given is not None:
        variables[VARIABLE] = given
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    output = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert "python -m deployments [OPTIONS] [name=value]" in output.stderr
    assert (output.stdout.split()[-1] == "127.0.0.1") == is_local
