"""What a terminal shows: text coloured by the origin of its tokens, and errors as one line."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "none"}
LEGEND = Text.assemble(
    ("accepted draft tokens", STYLES["accepted"]),
    *("; the target's own: ", ("in place of a draft token", STYLES["recovered"]), ", "),
    *(("after a whole draft", STYLES["bonus"]), ", ", ("without a draft", STYLES["plain"])),
)


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that shows text as it is."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def one_line_errors(status: int, *errors: type[Exception]) -> Iterator[None]:
    """Print one of these errors as one line, and exit with a status."""
    try:
        yield
    except errors as error:
        make_console(stderr=True).print(f"error: {error}", style="red")
        raise SystemExit(status) from error


def has_colours(console: Console) -> bool:
    """Return whether text can be coloured: on a terminal, unless NO_COLOR or TERM=dumb is set."""
    return console.is_terminal and console.color_system is not None and not console.no_color


class OriginColours:
    """Colours a stream's text by where its tokens came from; the server withholds text that may be a stop string."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, int]] = deque()  # of tokens whose text has not come

    def add(self, text: str, rounds: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """Yield the pieces of the next text, each with its style; `rounds` came in the same chunk."""
        for entry in rounds:
            for nth, token in enumerate(entry["texts"]):
                origin = "accepted" if nth < entry["accepted"] else entry["last"]
                self._spans.append((STYLES[origin], len(token)))
        while text:
            style, length = self._spans.popleft() if self._spans else ("none", len(text))
            yield text[:length], style
            if length > len(text):
                self._spans.appendleft((style, length - len(text)))
            text = text[length:]
