from collections.abc import Iterator

import pytest

from tests.load.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running
