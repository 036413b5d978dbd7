"""GrammarChecker: compiles a client's grammar in a process that can be stopped, before a worker has to.

How long a grammar takes to compile cannot be read off it: `{"type": "integer", "multipleOf": 1000003}` takes seconds,
ten times that number a hundred times as long, and nothing can interrupt the compiler. Workers only ever see grammars
that were compiled here within the limit.
"""

import contextlib
import json
import logging
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
_NUM_REMEMBERED = 256
_PROCESS = Path(__file__).with_name("process.py")


class GrammarChecker:
    """Owns one process, started for the first grammar and again after each grammar that had to be stopped.

    Not thread-safe.
    """

    def __init__(self, grammars: Grammars, *, timeout_s: float) -> None:
        """Start no process yet.

        Args:
            timeout_s: how long a grammar may take.
        """
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._stop_process: weakref.finalize[..., GrammarChecker] | None = None
        self._passed: OrderedDict[str, None] = OrderedDict()

    def check(self, grammar: str, field: str) -> None:
        """Compile a grammar, unless it is among the last ones that passed.

        Raises:
            RequestError: the grammar is wrong or took too long, or this model cannot follow one; names the field.
            CapacityError: the process could not be started.
        """
        if grammar not in self._passed:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start(field)
            error = _ask(self._process, grammar, self._timeout_s)
            if error is None:
                logger.warning("a grammar was stopped while it was compiled: %.200s", grammar)
                raise RequestError(f"{field} cannot be compiled within {self._timeout_s:g} s", field)
            if error:
                raise RequestError(f"{field}: {explain(error, grammar)}", field)
            self._passed[grammar] = None
            if len(self._passed) > _NUM_REMEMBERED:
                self._passed.popitem(last=False)
        self._passed.move_to_end(grammar)

    def _start(self, field: str) -> subprocess.Popen[str]:
        if self._stop_process is not None:
            self._stop_process()
        try:
            settings = {"table": self._grammars.table_settings(), "limits": LIMITS}
        except ModelError as error:
            raise RequestError(str(error), field) from error
        # -P: without it, the modules beside the file would hide packages of the same name.
        command = [sys.executable, "-P", str(_PROCESS)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        self._stop_process = weakref.finalize(self, _stop, process)
        answer = _ask(process, settings, _START_S)
        if answer is None:
            raise CapacityError(f"the process that compiles grammars did not start within {_START_S:g} s")
        if answer:
            raise RequestError(f"this model cannot follow a grammar: {answer}", field)
        return process


def _ask(process: subprocess.Popen[str], question: object, timeout_s: float) -> str | None:
    """Return the answer to one line; None if there was none in time, in which case the process has been stopped."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        timer.cancel()
    if not line:
        _stop(process)
        return None
    answer: str = json.loads(line)
    return answer


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    process.wait()
