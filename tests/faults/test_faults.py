"""Every fault once that tests/e2e/served has not, and what goes on without a GCS."""

import asyncio
import time
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from tests.e2e.served.test_faults import IN_EVERY_RUN
from tests.faults.answers import Answers
from tests.faults.faults import FAULTS
from tests.faults.redis_head import GCS_DOWN_S, MAX_REPLICAS
from tests.faults.report import SETUPS, open_server, report, why_not
from tests.faults.streams import REQUESTS, Received, open_session, receive_all

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

RECOVERED_WITHIN_S = 90.0


@pytest.mark.parametrize("setup", SETUPS)
def test_no_stream_notices_more_than_a_pause(setup):
    if reason := why_not(setup):
        pytest.skip(reason)
    names = [fault.name for fault in FAULTS.values() if fault.setup == setup and fault.name not in IN_EVERY_RUN]
    assert report(Console(), names, seed=len(setup), compile="off") == []


@pytest.mark.skipif(why_not("Redis") is not None, reason="no redis-server on this machine")
def test_without_a_gcs_new_requests_are_served_and_once_it_is_back_replicas_start():
    with closing(open_server("Redis", compile="off")) as server:
        answers = Answers(REQUESTS)

        async def stream_until(condition):
            """Send the eight streams again and again, twice at a time, until something holds; compare every one."""

            async def client():
                async with open_session(server.url) as session:
                    while not condition():
                        streams = [Received() for _ in REQUESTS]
                        await receive_all(session, streams)
                        assert [*map(answers.difference, range(len(streams)), streams)] == [None] * len(streams)

            async with asyncio.timeout(RECOVERED_WITHIN_S):
                await asyncio.gather(client(), client())

        fault = FAULTS["GCS SIGKILL"]
        fault.strike(server.process(fault.process))
        killed = time.monotonic()
        asyncio.run(stream_until(lambda: time.monotonic() > killed + 2 * GCS_DOWN_S))
        assert server.what_is_left() == {}
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process(":Router").kill()
        asyncio.run(stream_until(lambda: len(server.processes("TargetWorker")) == MAX_REPLICAS))
    assert answers.audit() == {}
