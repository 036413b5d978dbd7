"""Settings shared by every test."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_huge_pages_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no model that one test loads move the memory of the tests that come after it."""
    monkeypatch.setattr("engine.execution.cpu.backend.HUGE_PAGE_BYTES", 2**62)
