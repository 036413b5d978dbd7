"""Every fault once, at a moment that its seed says."""

import asyncio
import contextlib
import time

import httpx
import psutil
import pytest

from deployments import start_watcher
from tests.faults.faults import FAULTS
from tests.faults.redis_head import GCS_DOWN_S, MAX_REPLICAS
from tests.faults.server import APPEAR_TIMEOUT_S
from tests.faults.setups import open_server, why_not
from tests.faults.streams import open_session, receive_all
from tests.faults.trial import run_reference, run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

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


IN_EVERY_RUN = {f"{process} SIGKILL" for process in ("draft", "target", "Router", "Ingress", "HTTP proxy")}


def faults(*, cuts_streams):
    chosen = [fault for fault in FAULTS.values() if fault.cuts_streams == cuts_streams]
    params = [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in IN_EVERY_RUN else pytest.mark.long)
        for fault in chosen
    ]
    return pytest.mark.parametrize("fault", params)


@faults(cuts_streams=False)
def test_no_stream_notices_more_than_a_pause(fault, server, reference):
    before = server.num_resubmissions
    trial = asyncio.run(run_trial(server, fault, reference, seed=len(fault.name)))
    assert trial.problems == []
    assert server.what_is_left() == {}
    assert (server.num_resubmissions > before) == (fault.process == ":Router")


@faults(cuts_streams=True)
def test_a_request_that_was_cut_gets_the_same_content_when_it_is_sent_again(fault, server, reference):
    trial = asyncio.run(run_trial(server, fault, reference, seed=len(fault.name)))
    assert trial.problems == []
    assert server.what_is_left() == {}


async def stream_until(condition, server, reference):
    """Send the eight streams again and again, twice at a time, until something holds; compare every one."""

    async def client():
        async with open_session(server.url) as session:
            while not condition():
                assert reference.differences(dict(enumerate(await receive_all(session)))) == {}

    async with asyncio.timeout(RECOVERED_WITHIN_S):
        await asyncio.gather(client(), client())


def wait_for_start(server):
    """Return the Router that starts, as soon as somebody watches its start."""
    deadline = time.monotonic() + APPEAR_TIMEOUT_S
    while time.monotonic() < deadline:
        router = server.process(":Router")
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(start_watcher.__file__ in child.cmdline() for child in router.children()):
                return router
        time.sleep(0.05)
    raise RuntimeError("no start is watched")


@pytest.mark.long
@pytest.mark.parametrize("fault", [FAULTS["Router hangs"]], ids=["Router hangs while it starts"])
def test_a_router_that_hangs_while_it_starts_is_replaced(fault, server, reference):
    server.process(":Router").kill()
    starting = wait_for_start(server)
    fault.strike(starting)
    asyncio.run(stream_until(lambda: not starting.is_running(), server, reference))
    assert f"process {starting.pid} is ended, because its start hangs: it did not answer for 10 s" in server.log
    assert server.what_is_left() == {}


@pytest.mark.long
@pytest.mark.parametrize("fault", [FAULTS["GCS SIGKILL"]], ids=lambda fault: fault.name)
def test_without_a_gcs_new_requests_are_served_and_once_it_is_back_replicas_start(fault, server, reference):
    fault.strike(server.process(fault.process))
    killed = time.monotonic()
    asyncio.run(stream_until(lambda: time.monotonic() > killed + 2 * GCS_DOWN_S, server, reference))
    assert server.what_is_left() == {}
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.process(":Router").kill()
    asyncio.run(stream_until(lambda: len(server.processes("TargetWorker")) == MAX_REPLICAS, server, reference))
