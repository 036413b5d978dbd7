"""Traces of both formats are read alike, and cut to what a model takes."""

import json
from pathlib import Path

import pytest

from tests.load.server import LoadError
from tests.load.traces import Arrival, excerpt, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert read(path) == [Arrival(0.0, 374, 44), Arrival(pytest.approx(4.314579), 396, 109)]


def test_mooncake_traces_are_read_in_order_with_their_blocks_or_prompts(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3500, "input_length": 700, "output_length": 0, "hash_ids": [46, 48]},
        {"timestamp": 500, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 4000, "input_length": 10, "output_length": 3},
        {"timestamp": 4500.5, "text_input": "Call me", "output_length": 7},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read(path) == [
        Arrival(0.0, 600, 52, (46, 47)),
        Arrival(3.0, 700, 1, (46, 48)),
        Arrival(3.5, 10, 3),
        Arrival(4.0005, 0, 7, (), "Call me"),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "time,tokens\n1,2\n"),
        ("b.jsonl", '{"timestamp": 1}\n'),
        ("c.jsonl", "no json"),
        ("d.csv", AZURE[:80]),
        ("e.csv", "\n".join(AZURE.splitlines()[i] for i in (0, 1, 1))),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=name):
        read(tmp_path / name)
    with pytest.raises(LoadError, match=r"missing\.csv"):
        read(tmp_path / "missing.csv")


def test_an_excerpt_is_the_busiest_window_at_the_rate_asked_for() -> None:
    arrivals = [Arrival(time_s, 1, 1) for time_s in (0, 10, 20, 30, 31, 32, 33, 34, 50)]
    assert [arrival.time_s for arrival in excerpt(arrivals, duration_s=5, requests_per_s=None)] == [0, 1, 2, 3, 4]
    assert len(excerpt(arrivals, duration_s=5, requests_per_s=5 / 2)) == 10  # twice its 5 requests in 4 s
    assert excerpt(arrivals, duration_s=None, requests_per_s=None) == arrivals
    with pytest.raises(LoadError, match="--duration"):
        excerpt(arrivals, duration_s=0.5, requests_per_s=None)
