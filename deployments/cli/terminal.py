"""What a terminal shows: text coloured by the origin of its tokens, and errors as one line."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "none"}
MEANINGS = {
    "accepted": "accepted draft token",
    "recovered": "the target's own where the draft differed",
    "bonus": "the target's own after an accepted draft",
    "plain": "without a draft",
}


class CommandError(Exception):
    """A command cannot do what it was told to; the message is one line."""


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that shows text as it is."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def has_colours(console: Console) -> bool:
    """Return whether text can be coloured: on a terminal, unless NO_COLOR or TERM=dumb is set."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def legend() -> Text:
    """Return what each colour means."""
    return Text("; ").join(Text(MEANINGS[origin], STYLES[origin]) for origin in STYLES)


class OriginColours:
    """Colours a stream's text by where its tokens came from.

    The text of a chunk may end before the tokens of its rounds do, as the server withholds what may become a stop
    string; so the colours of tokens wait for their text.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[str, int]] = deque()

    def add(self, text: str, rounds: Sequence[Mapping[str, Any]]) -> Text:
        """Return the next text in colours; `rounds` are those of its chunk."""
        for entry in rounds:
            texts, num_accepted = entry["texts"], entry["accepted"]
            origins = ["accepted"] * num_accepted + [entry["last"]] * (len(texts) - num_accepted)
            self._spans += [(STYLES[origin], len(token)) for origin, token in zip(origins, texts, strict=True)]
        coloured = Text()
        while text:
            style, length = self._spans.popleft() if self._spans else ("none", len(text))
            coloured.append(text[:length], style)
            if length > len(text):
                self._spans.appendleft((style, length - len(text)))
            text = text[length:]
        return coloured
