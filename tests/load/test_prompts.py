"""Prompts come from any file, and text has the length that is asked for."""

import json
from pathlib import Path

import pytest

from tests.load.prompts import Prompt, SizedText, read_prompts
from tests.load.server import LoadError


def test_lines_of_json_are_read_in_all_their_forms(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "e"}]
    rows = [
        {"prompt": "a"},
        {"text": "b", "category": "code"},
        {"question": "c", "domain": "maths"},
        {"turns": ["d", "later"]},
        {"messages": messages},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_prompts([str(path)], seed=0)
    expected = [
        Prompt("a", "mine"),
        Prompt("b", "code"),
        Prompt("c", "maths"),
        Prompt("d", "mine"),
        Prompt(messages, "mine"),
    ]
    assert sorted(read, key=str) == sorted(expected, key=str)
    assert read == read_prompts([str(path)], seed=0)


@pytest.mark.parametrize("content", ["", "[1]\n", "{}\n", "no json\n", '{"prompt": ""}\n'])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(LoadError, match=r"bad\.jsonl"):
        read_prompts([str(tmp_path / "bad.jsonl")], seed=0)
    with pytest.raises(LoadError, match="nowhere"):
        read_prompts(["nowhere"], seed=0)


class Words:
    """Counts words and what surrounds them; remembers how often it was asked."""

    def __init__(self, num_surrounding: int) -> None:
        self.num_surrounding = num_surrounding
        self.num_calls = 0

    async def count(self, text: str) -> int:
        self.num_calls += 1
        return self.num_surrounding + len(text.split())


@pytest.mark.parametrize("num_surrounding", [0, 9])
async def test_text_has_the_number_of_tokens_that_the_server_counts(num_surrounding: int) -> None:
    words = Words(num_surrounding)
    text = SizedText(read_prompts(["bundled"], seed=0), words.count)
    await text.calibrate()
    for seed in range(10):
        assert await words.count(await text.exactly(300, seed)) == pytest.approx(300, abs=1)
        assert await words.count(text.about(300, seed)) == pytest.approx(300, rel=0.2)
    assert len({text.about(300, seed) for seed in range(10)}) == 10


async def test_prompts_whose_blocks_begin_alike_begin_alike() -> None:
    words = Words(0)
    text = SizedText(read_prompts(["bundled"], seed=0), words.count)
    await text.calibrate()
    first, second, other = (text.about(1400, i, ids) for i, ids in enumerate([(1, 2, 3), (1, 2, 4), (5, 2, 3)]))
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert await words.count(first[:common]) == pytest.approx(1024, rel=0.15)
    assert first[:200] != other[:200]
