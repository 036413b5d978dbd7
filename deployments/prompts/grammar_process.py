"""The process of a GrammarCompiler: reads the vocabulary's table, then forks for each grammar; answers with its error.

Its standard input is a Unix socket that passes connections: the first brings the table, each later connection a
grammar. A child inherits the table, and is ended alone if its grammar takes too long. The process runs as a file, so
that it imports nothing of this project.
"""

import json
import os
import signal
import socket
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

NICENESS = 5


def main() -> None:
    """Answer each connection with a JSON string: an error, or empty."""
    with socket.socket(fileno=0) as control:
        connection = _next(control)
        if connection is None:
            return
        settings = _read(connection)
        limits = LLParserLimits(**settings["limits"])
        try:
            table = LLTokenizer(**settings["table"])
        except ValueError as error:
            _answer(connection, str(error))
            return
        _answer(connection, "")
        os.nice(NICENESS)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not read
        while (connection := _next(control)) is not None:
            if os.fork() == 0:
                control.close()
                signal.setitimer(signal.ITIMER_PROF, settings["timeout_s"])  # its signal ends the child
                matcher = LLMatcher(table, _read(connection), log_level=0, limits=limits)
                matcher.compute_bitmask()
                _answer(connection, matcher.get_error() if matcher.is_error() else "")
                os._exit(0)
            connection.close()


def _next(control: socket.socket) -> socket.socket | None:
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _read(connection: socket.socket) -> Any:
    with connection.makefile("rb") as lines:
        return json.loads(lines.readline())


def _answer(connection: socket.socket, error: str) -> None:
    connection.sendall(json.dumps(error).encode() + b"\n")


if __name__ == "__main__":
    main()
