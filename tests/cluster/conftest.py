"""Fixtures shared by the tests of the cluster."""

import logging
from collections import Counter
from collections.abc import Callable

import pytest

from cluster.transport.credentials import Credentials, make_credentials


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()


@pytest.fixture
def dropped(caplog: pytest.LogCaptureFixture) -> Callable[[], Counter[str]]:
    """Return a function that counts what the transport has dropped so far, by the reason in its log."""
    caplog.set_level(logging.DEBUG, "cluster.transport")

    def count() -> Counter[str]:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Dropped")]
        return Counter(line.split(", ")[1].split()[0].strip(":") for line in lines)

    return count
