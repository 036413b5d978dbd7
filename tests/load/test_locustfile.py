"""The Locust users read a real stream; needs Locust, which is no dependency."""

import csv
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.load.fake_server import FakeServer

LOCUST = shutil.which("locust")
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


@pytest.mark.skipif(LOCUST is None, reason="Locust is not installed")
def test_locust_reports_the_first_token_and_the_time_per_token(server: FakeServer, tmp_path: Path) -> None:
    assert LOCUST is not None
    server.failures = {3: 429, 4: "cut"}
    command = [LOCUST, "-f", str(LOCUSTFILE), "--host", server.url, "--headless", "--users", "2"]
    command += ["--run-time", "3s", "--max-tokens", "7", "--csv", str(tmp_path / "locust")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    counts = {name: int(row["Request Count"]) for name, row in rows.items()}
    assert rows["/v1/completions"]["Failure Count"] == "2", ended.stderr
    assert counts["TTFT"] == counts["TPOT"] == counts["/v1/completions"] - 2
    assert ended.returncode == 1
