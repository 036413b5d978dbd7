"""How prompts are read and figures shown and written; what the bundled pair is worth, test_pair measures."""

from pathlib import Path

import pytest

from engine.training.evaluate import expected_length, read_prompts, run_ahead_bound, theorem_3_8


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


def test_the_formulas_give_the_published_figures() -> None:
    # Leviathan et al.: alpha 0.8, k 5, a free draft: 3.69x.
    assert theorem_3_8(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
    assert theorem_3_8(0.6, 1, 0.2) == pytest.approx((1 + 0.6) / (1 + 0.2))
    assert expected_length(1.0, 4) == 5.0
    # Running ahead gains the drafting time while it fits behind the target.
    assert run_ahead_bound(0.7, 4, 0.1) == pytest.approx(theorem_3_8(0.7, 4, 0.1) * (1 + 4 * 0.1))
    assert run_ahead_bound(0.7, 9, 0.2) == pytest.approx(expected_length(0.7, 9) / 2)
