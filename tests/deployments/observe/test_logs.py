"""The log of a replica in both formats, of background tasks that fail, and of starts that hang."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.observe.logs import START_GRACE_S, in_background, limited_start, serve_logging

REPLICA = """
import logging, sys
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.context import _set_request_context
from ray.serve.schema import LoggingConfig
from deployments.observe.logs import serve_logging, set_log_format

_, folder, log_format = sys.argv
settings = LoggingConfig(logs_dir=folder, **serve_logging(log_format))
names = {"component_name": "default_Router", "component_id": "r1", "component_type": ServeComponentType.REPLICA}
configure_component_logger(**names, logging_config=settings, max_bytes=0, backup_count=0)
set_log_format(log_format)
_set_request_context(request_id="mine")
logging.getLogger("ray.serve").info("request %s failed", "cmpl-1")
logging.getLogger("cluster.group").warning("lost")
logging.getLogger("cluster.group").info("not shown, in text neither")
"""
"""A replica's process, whose logger Serve sets up before our code runs."""


def log_of_a_replica(folder: Path, log_format: str) -> tuple[list[str], list[str]]:
    """The lines on stderr, and those in Serve's file."""
    command = [sys.executable, "-c", REPLICA, str(folder), log_format]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    [file] = folder.iterdir()
    return process.stderr.splitlines(), file.read_text().splitlines()


def test_a_replica_writes_objects_with_its_name_and_the_requests_id(tmp_path: Path) -> None:
    shown, filed = log_of_a_replica(tmp_path, "json")
    request, other = map(json.loads, shown)
    expected = {"message": "request cmpl-1 failed", "request_id": "mine", "replica": "r1", "levelname": "INFO"}
    assert expected.items() <= request.items()
    assert (other["message"], [json.loads(line)["message"] for line in filed]) == ("lost", ["request cmpl-1 failed"])


def test_text_is_as_serve_writes_it(tmp_path: Path) -> None:
    shown, [filed] = log_of_a_replica(tmp_path, "text")
    assert shown[0] == filed
    assert filed.endswith("default_Router r1 mine -- request cmpl-1 failed")
    assert shown[1:] == ["lost"]
    assert serve_logging("text") == {}


async def test_an_error_that_ends_a_background_task_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("bug")

    with caplog.at_level(logging.ERROR, "ray.serve"):
        await asyncio.wait([in_background(work(), name="count")])
        stopped = in_background(asyncio.Event().wait(), name="wait")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stopped.cancel()
        await asyncio.wait([stopped])
        await asyncio.sleep(0)
    [record] = caplog.records
    assert record.message == "the task 'count' has failed and is not started again"
    assert "ValueError: bug" in caplog.text


START = """
import time
from deployments.observe import logs
logs.START_GRACE_S = 0.0
with logs.limited_start({limit_s}):
    print("starting", flush=True)
    time.sleep({start_s})
time.sleep(1)
print("started")
"""


@pytest.mark.parametrize(("limit_s", "start_s", "ends"), [(0.5, 60, True), (0.5, 0, False)])
def test_a_start_that_hangs_ends_its_process_and_says_where(limit_s: float, start_s: float, ends: bool) -> None:
    command = [sys.executable, "-c", START.format(limit_s=limit_s, start_s=start_s)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert process.returncode == int(ends)
    assert ("started" in process.stdout) != ends
    assert ("Timeout" in process.stderr and "line 7 in <module>" in process.stderr) == ends


def test_a_start_that_fails_is_limited_no_more() -> None:
    with pytest.raises(ValueError, match="bad model"), limited_start(600):
        raise ValueError("bad model")
    assert START_GRACE_S > 0, "a start that times out by itself says why"
