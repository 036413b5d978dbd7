"""Twenty seconds of chaos; and the soak would notice what goes wrong."""

from functools import partial

import pytest
from rich.console import Console

from tests.faults import soak as soak_module
from tests.faults.server import FaultServer
from tests.faults.soak import soak


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_twenty_seconds_of_chaos_change_no_text_and_leave_nothing_behind(tmp_path, monkeypatch):
    # Compiling would take both cores for longer than the chaos lasts.
    monkeypatch.setattr(soak_module, "FaultServer", partial(FaultServer, compile="off"))
    report = soak(20.0, seed=0, json_path=tmp_path / "soak.json", console=Console(quiet=True))
    log = (tmp_path / "soak.log").read_text()
    assert report.problems == [], log[-10_000:]
    assert sum(report.faults.values()) >= 5
    assert report.requests["same"] > 20
