import json
import re
import subprocess
import sys
from pathlib import Path

from deployments.grammar_check import process as module
from engine.sampling.grammar import LIMITS, Grammars, from_regex

SOURCE = Path(module.__file__)


def test_the_process_imports_nothing_of_this_project() -> None:
    """It is started often, and beside a model's memory."""
    assert not re.search(r"^(from|import) (engine|cluster|deployments)", SOURCE.read_text(), re.MULTILINE)


def test_it_answers_each_grammar_with_what_is_wrong_with_it(grammars: Grammars) -> None:
    lines = [{"table": grammars.table_settings(), "limits": LIMITS}, from_regex("a|b"), "no grammar", from_regex("c")]
    result = subprocess.run(
        [sys.executable, "-P", str(SOURCE)],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
    )
    started, first, bad, last = map(json.loads, result.stdout.splitlines())
    assert (started, first, last) == ("", "", "")
    assert bad
