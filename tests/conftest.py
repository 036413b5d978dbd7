"""Settings shared by every test."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None)  # any example may wait for a core

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; it has no other way to run on a CPU

AS_A_WHOLE = (
    "tests/e2e/served/",
    "tests/e2e/replicated/",
    "tests/engine/execution/cpu/",
    "tests/e2e/groups/",
    "tests/e2e/test_autoscaling.py",
    "tests/engine/test_matrix.py",
    "tests/engine/heads/test_cold_starts.py",
)
"""What one process runs, because its tests share a server, a cluster or what they compile; the longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which `make vllm` runs tests of our own passes over vLLM."""
    parser.addoption("--execution", choices=("torch", "vllm"), default="torch", help="what computes the target")


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM warn."""
    if config.getoption("execution") == "vllm":
        config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session")
def execution(request: pytest.FixtureRequest) -> str:
    """What computes the target."""
    return str(request.config.getoption("execution"))


def _whole(nodeid: str) -> int:
    """The number of the entry that a test belongs to; of others, one more than there are."""
    return next((nth for nth, start in enumerate(AS_A_WHOLE) if nodeid.startswith(start)), len(AS_A_WHOLE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, begin with what takes long, so that no process is left with it when the other has ended."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _whole(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out files, and the entries of AS_A_WHOLE."""
    from xdist.scheduler import LoadFileScheduling

    class WholeScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return (*AS_A_WHOLE, super()._split_scope(nodeid))[_whole(nodeid)]

    return WholeScheduling(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def plain_noise() -> Iterator[None]:
    """Leave no compiled noise, whose last bit may differ, to the tests that follow in this process."""
    yield
    from engine.sampling import noise  # not above, where it might import Triton first

    noise.IMPLEMENTATIONS.clear()
