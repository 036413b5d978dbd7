"""RecordLog: the files to which one Ingress writes its records, on a thread, within a fixed size."""

import logging
import os
import sys
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Queue

from deployments.records.record import Recording

logger = logging.getLogger("ray.serve")  # the only logger that Serve shows

MAX_FILE_BYTES = 64 * 2**20
MAX_FILES = 16  # of a folder, in which every replica has files of its own
MAX_WAITING = 1024  # records to be written; more are lost


class RecordLog(QueueHandler):
    """Appends records to a folder's file of this replica; a record that cannot be written is lost, and logged."""

    def __init__(self, folder: Path, replica: str) -> None:
        super().__init__(Queue(MAX_WAITING))
        self.file = _File(folder / f"{replica}.jsonl", maxBytes=MAX_FILE_BYTES, backupCount=MAX_FILES, delay=True)
        self.listener = QueueListener(self.queue, self.file)
        self.listener.start()

    def keep(self, recording: Recording) -> None:
        """Have a finished answer's record made and written, if its client allows that."""
        if recording.is_allowed:
            recording.stop()
            self.handle(logging.makeLogRecord({"msg": recording}))

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave the record to be made on the thread."""
        return record

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a record for which there is no room."""
        self.file.handleError(record)


class _File(RotatingFileHandler):
    num_lost = 0

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, Recording):  # the size is asked for, too
            record.msg = record.msg.record().model_dump_json(exclude_none=True)
        return str(record.msg)

    def flush(self) -> None:
        super().flush()
        if self.num_lost:
            logger.warning("%d records were lost; now they are written again", self.num_lost)
            self.num_lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.num_lost:
            logger.error("records are being lost: %r", sys.exception())
        self.num_lost += 1

    def _open(self) -> TextIOWrapper:
        """Open a file that nobody else can read, and remove the folder's oldest files."""
        folder = Path(self.baseFilename).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest_first = sorted(folder.glob("*.jsonl*"), key=os.path.getmtime, reverse=True)
        for path in newest_first[MAX_FILES - 1 :]:
            path.unlink(missing_ok=True)
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))
