"""RecordLog: the folder stays within its size, and a disk that is full breaks nothing."""

from pathlib import Path
from typing import Any

import pytest

from deployments.records import record_log
from deployments.records.record import Record, RecordedChoice, Recording
from deployments.records.record_log import RecordLog
from tests.waiting import wait_until

RECORD = Record(path="/v1/completions", body={"prompt": "a"}, choices=[RecordedChoice(token_ids=[1])])


class Finished(Recording):
    """A recording of a short answer."""

    is_allowed = True

    def __init__(self) -> None:
        self.started = 0.0

    def record(self) -> Record:
        return RECORD


def keep(log: RecordLog, count: int) -> None:
    recording: Any = Finished()
    for _ in range(count):
        log.keep(recording)


def test_files_are_rotated_and_the_oldest_of_the_folder_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = len(RECORD.model_dump_json(exclude_none=True)) + 1
    monkeypatch.setattr(record_log, "MAX_FILE_BYTES", 10 * length + 1)
    monkeypatch.setattr(record_log, "MAX_FILES", 3)
    for replica in ("first", "second"):
        log = RecordLog(tmp_path / "records", replica)
        keep(log, 25)
        log.listener.stop()
    files = {path.name: path.read_text().count("\n") for path in (tmp_path / "records").iterdir()}
    assert files == {"second.jsonl": 5, "second.jsonl.1": 10, "second.jsonl.2": 10}
    assert (tmp_path / "records" / "second.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_said_once_and_records_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "records").write_text("a file where the folder should be")
    log = RecordLog(tmp_path / "records", "replica")
    keep(log, 3)
    wait_until(lambda: log.file.num_lost == 3, 10)
    (tmp_path / "records").unlink()
    keep(log, 2)
    log.listener.stop()
    assert (tmp_path / "records" / "replica.jsonl").read_text().count("\n") == 2
    said = [record.message for record in caplog.records]
    assert [text[:24] for text in said] == ["records are being lost: ", "3 records were lost; now"]


def test_records_that_wait_too_long_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_log, "MAX_WAITING", 2)
    monkeypatch.setattr(record_log.QueueListener, "start", lambda listener: None)
    log = RecordLog(tmp_path, "replica")
    keep(log, 5)
    assert log.file.num_lost == 3
