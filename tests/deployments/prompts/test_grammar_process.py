import json
import re
import socket
import subprocess
import sys
from pathlib import Path

from deployments.prompts import grammar_process as module
from engine.sampling.grammar import LIMITS, Grammars
from engine.sampling.grammar_text import from_regex

SOURCE = Path(module.__file__)


def test_the_process_imports_nothing_of_this_project() -> None:
    """It is started beside a model's memory, and forks."""
    assert not re.search(r"^(from|import) (engine|cluster|deployments)", SOURCE.read_text(), re.MULTILINE)


def test_it_answers_each_connection_with_what_is_wrong_until_no_more_come(grammars: Grammars) -> None:
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", str(SOURCE)], stdin=theirs)
    questions = [
        {"table": grammars.table_settings(), "limits": LIMITS, "timeout_s": 5.0},
        *(from_regex("a|b"), "no grammar", from_regex("c")),
    ]
    answers = []
    for question in questions:
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rwb") as stream:
            with theirs:
                socket.send_fds(control, [b"?"], [theirs.fileno()])
            stream.write(json.dumps(question).encode() + b"\n")
            stream.flush()
            answers.append(json.loads(stream.readline()))
    started, first, bad, last = answers
    assert (started, first, last) == ("", "", "")
    assert bad
    control.close()
    assert process.wait(30) == 0
