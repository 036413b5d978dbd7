"""Fixtures shared by the tests of the cluster."""

import pytest

from cluster.transport.credentials import Credentials, make_credentials


@pytest.fixture
def credentials() -> Credentials:
    return make_credentials()
