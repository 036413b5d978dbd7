"""Every fault once, at a moment that its seed says."""

import asyncio

import pytest

from tests.faults.faults import FAULTS
from tests.faults.nodes import open_server
from tests.faults.trial import run_reference, run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server(request):
    server = open_server(request.param, num_trials=1)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def reference(server):
    reference = asyncio.run(run_reference(server))
    assert all(stream.has_ended and stream.error is None for stream in reference.streams)
    return reference


IN_EVERY_RUN = {f"{process} SIGKILL" for process in ("draft", "target", "Router", "Ingress", "HTTP proxy")}


def faults(*, cuts_streams):
    chosen = [fault for fault in FAULTS.values() if fault.cuts_streams == cuts_streams]
    params = [
        pytest.param(fault, fault.setup, id=fault.name, marks=[] if fault.name in IN_EVERY_RUN else pytest.mark.long)
        for fault in chosen
    ]
    return pytest.mark.parametrize(("fault", "server"), params, indirect=["server"])


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
