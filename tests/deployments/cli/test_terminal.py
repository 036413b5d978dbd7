"""Colours by origin."""

import io

import pytest
from rich.console import Console

from deployments.cli.terminal import STYLES, OriginColours, has_colours

ROUNDS = [
    {"texts": [" and", " so"], "accepted": 1, "draft": [" and", " then"], "last": "recovered"},
    {"texts": [" on", "", "é", "!"], "accepted": 3, "draft": [" on", "", "é"], "last": "bonus"},
    {"texts": [" x"], "accepted": 1, "draft": [" x", " y"], "last": "accepted"},
    {"texts": [" z"], "accepted": 0, "draft": [], "last": "plain"},
]
ORIGINS = {" and": "accepted", " so": "recovered", " on": "accepted", "é": "accepted", "!": "bonus"} | {
    " x": "accepted",
    " z": "plain",
}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_each_token_has_the_colour_of_its_origin_though_its_text_comes_later(size: int) -> None:
    colours, text = OriginColours(), "".join(ORIGINS)
    shown: list[tuple[str, str]] = []
    for start in range(0, len(text), size):
        for part, style in colours.add(text[start : start + size], ROUNDS if start == 0 else ()):
            shown += [(char, style) for char in part]
    assert shown == [(char, STYLES[origin]) for token, origin in ORIGINS.items() for char in token]
    assert [*colours.add("without rounds", ())] == [("without rounds", "none")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, False), ({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_only_a_terminal_that_may_be_coloured_is(variables: dict[str, str], expected: bool) -> None:
    console = Console(file=io.StringIO(), _environ=variables, force_terminal=bool(variables))
    assert has_colours(console) == expected
