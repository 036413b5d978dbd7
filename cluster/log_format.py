"""How a process writes its log to stderr, which Ray shows in the terminal that started the application."""

import logging
from typing import Literal

from ray._common.filters import CoreContextFilter
from ray._common.formatters import JSONFormatter

LogFormat = Literal["text", "json"]

TEXT = "%(levelname)s %(asctime)s -- %(message)s"


def stderr_handler(log_format: LogFormat) -> logging.Handler:
    """Return a handler that writes lines of text, or JSON objects with the fields that Ray and Serve give theirs."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JSONFormatter())
        handler.addFilter(CoreContextFilter())  # ids of job, node, worker and actor
    else:
        handler.setFormatter(logging.Formatter(TEXT))
    return handler
