"""Settings shared by every test."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; it has no other way to run on a CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, begin with the files that start servers, so that none is left with one when the other has ended."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
