"""The process of a GrammarChecker: reads the vocabulary's table, then one grammar per line; answers what is wrong.

It is run as a file, so that it imports llguidance and nothing of this project.
"""

import json
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def main() -> None:
    """Answer every line with a JSON string, empty if nothing is wrong, until the input ends."""
    settings = json.loads(sys.stdin.readline())
    limits = LLParserLimits(**settings["limits"])
    try:
        table = LLTokenizer(**settings["table"])
    except ValueError as error:
        _answer(str(error))
        return
    _answer("")
    for line in sys.stdin:
        matcher = LLMatcher(table, json.loads(line), log_level=0, limits=limits)
        matcher.compute_bitmask()
        _answer(matcher.get_error() if matcher.is_error() else "")


def _answer(error: str) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
