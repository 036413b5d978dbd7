"""The log as JSON, for the setting `log_format=json`: an object per line, with the fields of Serve's own JSON files.

Serve's `LoggingConfig(encoding="JSON")` is about its files only: what it writes to stderr stays text.
"""

import json
import logging
import threading
from collections.abc import Callable
from io import TextIOBase
from logging.handlers import MemoryHandler
from typing import Any, TextIO

from cluster.log_format import LogFormat, stderr_handler

SERVE_LOGGER = "ray.serve"


def serve_logging(log_format: LogFormat) -> dict[str, Any]:
    """Return Serve's logging settings."""
    return {"encoding": "JSON"} if log_format == "json" else {}


def set_log_format(log_format: LogFormat) -> None:
    """Have this process, a replica or the driver, write to stderr in this format."""
    if log_format == "text":
        return  # as Serve has set it up
    logger = logging.getLogger(SERVE_LOGGER)
    files = [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(stderr_handler("json").formatter)
            # They put request id, deployment and replica into records.
            handler.filters += [entry for file in files for entry in file.filters if entry not in handler.filters]
    root = stderr_handler("json")
    root.setLevel(logging.WARNING)  # as without any handler
    logging.basicConfig(handlers=[root], force=True)


class Lines(TextIOBase):
    """A stream that writes each line as a function returns it, or leaves it out where that returns None.

    Several threads may write: Ray's prints what the workers write, each line and its end by themselves.
    """

    def __init__(self, stream: TextIO, convert: Callable[[str], str | None]) -> None:
        self._stream = stream
        self._convert = convert
        self._begun = threading.local()

    def write(self, text: str) -> int:
        """Write all lines that are whole."""
        *lines, self._begun.line = (getattr(self._begun, "line", "") + text).split("\n")
        for line in lines:
            if (converted := self._convert(line)) is not None:
                self._stream.write(f"{converted}\n")
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the stream's own descriptor."""
        return self._stream.fileno()


class JsonLines(Lines):
    """A stream that writes an object per line: lines that hold one as they are, others as its message.

    The driver prints what all processes write, and some of that is not written by any logger of ours.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, _to_json)


def _to_json(line: str) -> str | None:
    if not line.strip():
        return None
    if line.startswith("{"):
        try:
            # Ray counts repeated lines after them.
            _, end = json.JSONDecoder().raw_decode(line)
        except json.JSONDecodeError:
            pass
        else:
            return line[:end]
    return json.dumps({"message": line})
