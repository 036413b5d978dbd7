"""GrammarCompiler: makes grammars of clients' constraints, and compiles them in processes before a worker has to.

Compile time cannot be predicted: `{"type": "integer", "multipleOf": 1000003}` takes seconds, ten times that number a
hundred times as long, and nothing can interrupt the compiler. Workers get only grammars that compiled here in time.
"""

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

from deployments.openai.structured_output import GrammarSource
from engine.errors import CapacityError, ModelError, RequestError
from engine.sampling.grammar import LIMITS, Grammars, explain
from engine.sampling.grammar_text import salted

logger = logging.getLogger("ray.serve")

NUM_AT_ONCE = 32
MAX_GRAMMAR_CHARS = 2**16
"""Characters of a JSON schema, a regular expression, a grammar, or all choices together: more than any real schema."""
TIMEOUT_S = 0.5
"""Seconds of processor time for compiling a grammar: its first use stops all streams of a Router as long."""

_START_S = 60.0
_ANSWER_S = 60.0  # more than TIMEOUT_S, because other processes may need the cores
_NUM_REMEMBERED = 256
_PROCESS = Path(__file__).with_name("grammar_process.py")


class GrammarCompiler:
    """Makes grammars on threads, and compiles them in a process that forks for each grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, "grammars")
        self._converting = threading.Lock()
        self._starting = threading.Lock()
        self._process: _Process | None = None
        self._check_once = lru_cache(_NUM_REMEMBERED)(self._check)

    async def compile(self, source: GrammarSource, salt: str | None = None) -> str:
        """Return a source's grammar, compiled for each salt; raise RequestError, or CapacityError without an answer."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, source, salt)

    def _compile(self, source: GrammarSource, salt: str | None) -> str:
        grammar = salted(self._convert(source), salt)
        self._check_once(grammar, source.field)
        return grammar

    def _convert(self, source: GrammarSource) -> str:
        field, value = source.field, source.value
        num_chars = len(value if isinstance(value, str) else json.dumps(value))
        if num_chars > (limit := MAX_GRAMMAR_CHARS):
            raise RequestError(f"{field} has {num_chars:,} characters, at most {limit:,} are allowed", field)
        # Python threads that compute take turns with the event loop, so there must be few of them.
        with self._converting if source.takes_long else nullcontext():
            try:
                grammar = source.to_grammar()
            except RequestError as error:
                raise RequestError(f"{field}: {error}", field) from None
        return grammar if source.thoughts is None else source.thoughts.before(grammar, self._grammars.ends)

    def _check(self, grammar: str, field: str) -> None:
        with self._starting:
            process = self._running(field)
        error = process.ask(grammar, _ANSWER_S)
        if error is None:
            logger.warning("a grammar was stopped while it was compiled: %.200s", grammar)
            raise RequestError(f"{field} cannot be compiled within {TIMEOUT_S:g} s", field)
        if error:
            raise RequestError(f"{field}: {explain(error, grammar)}", field)

    def _running(self, field: str) -> "_Process":
        if self._process is None or not self._process.is_alive:
            try:
                table = self._grammars.table_settings()
            except ModelError as error:
                raise RequestError(str(error), field) from error
            process = _Process()
            problem = process.ask({"table": table, "limits": LIMITS, "timeout_s": TIMEOUT_S}, _START_S)
            if problem:
                raise RequestError(f"this model cannot follow a grammar: {problem}", field)
            self._process = process
        return self._process


class _Process:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            # -P: without it, the modules beside the file would hide packages of the same name.
            command = [sys.executable, "-P", str(_PROCESS)]
            self._popen = subprocess.Popen(command, stdin=theirs.fileno())
        weakref.finalize(self, _stop, self._popen, self._control)

    @property
    def is_alive(self) -> bool:
        try:
            return self._control.recv(1, socket.MSG_DONTWAIT) != b""  # it writes nothing
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def ask(self, question: object, timeout_s: float) -> str | None:
        """Return the answer; None if its process was stopped; raise CapacityError without an answer in time."""
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
