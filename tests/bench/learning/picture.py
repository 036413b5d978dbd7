"""The picture of a curve, as SVG."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.bench.learning.curve import Window

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 280, 44, 34
_LINES = {"frozen": "#9aa0a6", "learning": "#1a73e8"}


def draw(windows: Sequence[Window], path: Path) -> None:
    """Write tokens a pass over tokens of traffic, frozen and learning, with a mark for each swap."""
    most, top = windows[-1].num_tokens, max(max(window.frozen, window.learning) for window in windows)

    def x(num_tokens: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 8) * num_tokens / most, 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 24) * (value - 1) / (top - 1), 1)

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>']
    begin = 0
    for domain, group in groupby(windows, key=lambda window: window.domain):
        end = [*group][-1].num_tokens
        parts.append(f'<line x1="{x(end)}" y1="20" x2="{x(end)}" y2="{_HEIGHT - _BOTTOM}" stroke="#dadce0"/>')
        parts.append(f'<text x="{x((begin + end) / 2)}" y="14" text-anchor="middle">{domain}</text>')
        begin = end
    for tick in range(0, most + 1, 50_000):
        parts.append(f'<text x="{x(tick)}" y="{_HEIGHT - 18}" text-anchor="middle">{tick // 1000}k</text>')
    for value in (half / 2 for half in range(2, int(2 * top) + 1)):
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y(value)}" x2="{_WIDTH - 8}" y2="{y(value)}" stroke="#eeeeee"/>')
    for name, colour in _LINES.items():
        points = " ".join(f"{x(window.num_tokens)},{y(getattr(window, name))}" for window in windows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for window in windows:
        if window.num_swaps:
            parts.append(f'<circle cx="{x(window.num_tokens)}" cy="{y(window.learning)}" r="4" fill="#1a73e8"/>')
    legend = "tokens a pass over tokens of traffic: grey frozen, blue learning; a dot: other weights took over"
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 3}">{legend}</text>')
    attributes = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="#3c4043"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>\n' + "\n".join(parts) + "\n</svg>\n")
