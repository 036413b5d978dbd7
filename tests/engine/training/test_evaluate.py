"""How prompts are read and figures shown and written; what the bundled pair is worth, test_pair measures."""

from pathlib import Path

import pytest

from engine.training.evaluate import read_prompts


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "one\ntwo\n\n\n  three\n", ["one\ntwo", "  three"]),
        ("a.jsonl", '{"prompt": "one\\n\\ntwo"}\n\n{"prompt": "three", "id": 5}\n', ["one\n\ntwo", "three"]),
    ],
)
def test_prompts_are_paragraphs_or_json_lines(name: str, text: str, prompts: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == prompts
