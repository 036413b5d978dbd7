"""Processes of the way are killed once under eight streams; tests/faults has more faults, which take longer."""

import asyncio

import pytest

from tests.e2e.servers import Server
from tests.faults.answers import Answers
from tests.faults.faults import FAULTS
from tests.faults.server import FaultServer
from tests.faults.streams import REQUESTS
from tests.faults.trial import run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

IN_EVERY_RUN = [f"{process} SIGKILL" for process in ("target", "Router", "Ingress")]


class FaultyServer(FaultServer):
    """The server of this folder, for trials."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.pid = server.process.pid
        self._log = server.log


@pytest.fixture(scope="module")
def faulty(server: Server) -> FaultyServer:
    return FaultyServer(server)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(REQUESTS)


@pytest.mark.parametrize("fault", [FAULTS[name] for name in IN_EVERY_RUN], ids=lambda fault: fault.name)
def test_streams_have_their_text_although_a_process_is_killed(fault, faulty, answers):
    """Where the connections end at the process, the clients come back with the id of the last event."""
    before = faulty.num_resubmissions
    trial = asyncio.run(run_trial(faulty, fault, answers, seed=len(fault.name)))
    assert trial.problems == []
    assert faulty.what_is_left() == {}
    if not fault.cuts_streams:
        assert (faulty.num_resubmissions > before) == (fault.process == ":Router")
