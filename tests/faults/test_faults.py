"""Every fault once that tests/e2e/served has not, at a moment that its seed says."""

import asyncio
import time

import httpx
import pytest

from tests.e2e.served.test_faults import IN_EVERY_RUN
from tests.faults.faults import FAULTS
from tests.faults.redis_head import GCS_DOWN_S, MAX_REPLICAS
from tests.faults.report import open_server, why_not
from tests.faults.streams import open_session, receive_all
from tests.faults.trial import run_reference, run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

RECOVERED_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def current():
    """The server of the last setup and its streams without faults, for further faults of that setup."""
    current = {}
    yield current
    stop(current)


def stop(current):
    while current:
        current.popitem()[1][0].stop()


@pytest.fixture
def server_and_reference(current, fault):
    if fault.setup not in current:
        stop(current)
        if reason := why_not(fault.setup):
            pytest.skip(reason)
        server = open_server(fault.setup, num_trials=1, compile="off")
        current[fault.setup] = server, None
        reference = asyncio.run(run_reference(server))
        assert all(stream.has_ended and stream.error is None for stream in reference.streams)
        current[fault.setup] = server, reference
    return current[fault.setup]


@pytest.fixture
def server(server_and_reference):
    return server_and_reference[0]


@pytest.fixture
def reference(server_and_reference):
    return server_and_reference[1]


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS.values() if fault.name not in IN_EVERY_RUN], ids=lambda fault: fault.name
)
def test_no_stream_notices_more_than_a_pause(fault, server, reference):
    before = server.num_resubmissions
    trial = asyncio.run(run_trial(server, fault, reference, seed=len(fault.name)))
    assert trial.problems == []
    assert server.what_is_left() == {}
    assert (server.num_resubmissions > before) == (fault.process == ":Router")


async def stream_until(condition, server, reference):
    """Send the eight streams again and again, twice at a time, until something holds; compare every one."""

    async def client():
        async with open_session(server.url) as session:
            while not condition():
                assert reference.differences(dict(enumerate(await receive_all(session)))) == {}

    async with asyncio.timeout(RECOVERED_WITHIN_S):
        await asyncio.gather(client(), client())


@pytest.mark.parametrize("fault", [FAULTS["GCS SIGKILL"]], ids=lambda fault: fault.name)
def test_without_a_gcs_new_requests_are_served_and_once_it_is_back_replicas_start(fault, server, reference):
    fault.strike(server.process(fault.process))
    killed = time.monotonic()
    asyncio.run(stream_until(lambda: time.monotonic() > killed + 2 * GCS_DOWN_S, server, reference))
    assert server.what_is_left() == {}
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.process(":Router").kill()
    asyncio.run(stream_until(lambda: len(server.processes("TargetWorker")) == MAX_REPLICAS, server, reference))
