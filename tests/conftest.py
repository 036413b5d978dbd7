"""Settings shared by every test."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; it has no other way to run on a CPU


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
