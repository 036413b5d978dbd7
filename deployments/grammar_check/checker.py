"""GrammarChecker: compiles clients' grammars in processes that end if they take too long, before a worker has to.

How long a grammar takes to compile cannot be read off it: `{"type": "integer", "multipleOf": 1000003}` takes seconds,
ten times that number a hundred times as long, and nothing can interrupt the compiler. Workers only ever see grammars
that were compiled here within the limit.
"""

import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

from engine.errors import CapacityError, ModelError, RequestError
from engine.sampling.grammar import LIMITS, Grammars, explain

logger = logging.getLogger("ray.serve")

_START_S = 60.0
"""Python's start, and the table of a large vocabulary."""
_ANSWER_S = 60.0
"""More than processor time alone: others may need the cores."""
_NUM_REMEMBERED = 256
_PROCESS = Path(__file__).with_name("process.py")


class GrammarChecker:
    """Owns one process, started for the first grammar, which forks for each grammar: none waits for another."""

    def __init__(self, grammars: Grammars, *, timeout_s: float) -> None:
        """Start no process yet.

        Args:
            timeout_s: how much processor time a grammar may take.
        """
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._passed: OrderedDict[str, None] = OrderedDict()
        self._process: _Process | None = None

    def check(self, grammar: str, field: str) -> None:
        """Compile a grammar, unless it is among the last ones that passed; on any thread.

        Raises:
            RequestError: the grammar is wrong or took too long, or this model cannot follow one; names the field.
            CapacityError: the process does not start, or does not answer.
        """
        if grammar not in self._passed:
            with self._lock:
                process = self._running(field)
            error = process.ask(grammar, _ANSWER_S)
            if error is None:
                logger.warning("a grammar was stopped while it was compiled: %.200s", grammar)
                raise RequestError(f"{field} cannot be compiled within {self._timeout_s:g} s", field)
            if error:
                raise RequestError(f"{field}: {explain(error, grammar)}", field)
        with self._lock:
            self._passed[grammar] = None
            self._passed.move_to_end(grammar)
            if len(self._passed) > _NUM_REMEMBERED:
                self._passed.popitem(last=False)

    def _running(self, field: str) -> "_Process":
        """Return the process; start it if there is none, or if it has ended."""
        if self._process is None or not self._process.is_alive:
            try:
                table = self._grammars.table_settings()
            except ModelError as error:
                raise RequestError(str(error), field) from error
            process = _Process()
            problem = process.ask({"table": table, "limits": LIMITS, "timeout_s": self._timeout_s}, _START_S)
            if problem:
                raise RequestError(f"this model cannot follow a grammar: {problem}", field)
            self._process = process
        return self._process


class _Process:
    """`process.py`, which takes questions from sockets of their own."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            # -P: without it, the modules beside the file would hide packages of the same name.
            command = [sys.executable, "-P", str(_PROCESS)]
            self._popen = subprocess.Popen(command, stdin=theirs.fileno())
        weakref.finalize(self, _stop, self._popen, self._control)

    @property
    def is_alive(self) -> bool:
        """Whether the process still takes connections."""
        try:
            return self._control.recv(1, socket.MSG_DONTWAIT) != b""  # it writes nothing
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def ask(self, question: object, timeout_s: float) -> str | None:
        """Return the answer to one question; None if what computed it was stopped.

        Raises:
            CapacityError: the process has ended, or did not answer in time.
        """
        connection, theirs = socket.socketpair()
        with connection:
            connection.settimeout(timeout_s)
            try:
                with theirs:
                    socket.send_fds(self._control, [b"?"], [theirs.fileno()])
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
            except TimeoutError:
                raise CapacityError(f"no grammar was compiled within {timeout_s:g} s") from None
            except (BrokenPipeError, ConnectionResetError):
                line = b""
        if line:
            answer: str = json.loads(line)
            return answer
        if not self.is_alive:
            raise CapacityError("the process that compiles grammars has ended")
        return None


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
