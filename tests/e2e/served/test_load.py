"""The bundled pair under load, as a user would test it: every text is right."""

import json
from pathlib import Path

import pytest

from tests.e2e.servers import Server
from tests.load.__main__ import main
from tests.load.ci import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def test_the_bundled_pair_writes_the_targets_text_under_load(server: Server, tmp_path: Path) -> None:
    assert main(["--url", server.url, *ARGUMENTS, "--requests", "12", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    off, adaptive = (summary["arms"][name] for name in ("off", "adaptive"))
    assert off["texts_checked"] == adaptive["texts_checked"] == 24
    assert off["texts_differing"] == adaptive["texts_differing"] == 0
    assert off["acceptance"]["num_drafts"] == 0 < adaptive["acceptance"]["num_accepted_tokens"]
    assert off["latencies_ms"]["itl"] is not None
    assert summary["speed_up"]["adaptive"]["all"]["low"] is not None
