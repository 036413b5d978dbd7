"""The log as JSON: of a replica, of the driver, and of what writes no JSON."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.json_log import JsonLines, Lines, serve_logging

REPLICA = """
import logging, sys
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.context import _set_request_context
from ray.serve.schema import LoggingConfig
from deployments.json_log import serve_logging, set_log_format

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
    assert {"message": "lost", "levelname": "WARNING"}.items() <= other.items()
    assert [json.loads(line)["message"] for line in filed] == ["request cmpl-1 failed"]


def test_text_is_as_serve_writes_it(tmp_path: Path) -> None:
    shown, [filed] = log_of_a_replica(tmp_path, "text")
    assert shown[0] == filed
    assert filed.endswith("default_Router r1 mine -- request cmpl-1 failed")
    assert shown[1:] == ["lost"]
    assert serve_logging("text") == {}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"message": "a"}\n', ['{"message": "a"}']),
        ('{"message": "a"}\x1b[32m [repeated 2x across cluster]\n', ['{"message": "a"}']),
        ("INFO a\n\n  b\n", ['{"message": "INFO a"}', '{"message": "  b"}']),
        ("{'a'\n", ['{"message": "{\'a\'"}']),
        ("not whole", []),
    ],
)
def test_every_line_becomes_an_object(written: str, expected: list[str]) -> None:
    sink = io.StringIO()
    stream = JsonLines(sink)
    for character in written:
        stream.write(character)
    assert sink.getvalue().splitlines() == expected


def test_a_line_that_another_thread_has_begun_stays_apart() -> None:
    """`print` writes a line and its end by themselves, and Ray prints on a thread of its own."""
    sink = io.StringIO()
    stream = Lines(sink, str)
    stream.write("mine")
    other = threading.Thread(target=stream.write, args=("another\n",))
    other.start()
    other.join()
    stream.write("\n")
    assert sink.getvalue() == "another\nmine\n"
