import pytest

from engine.training.acceptance import Acceptance
from engine.training.speedup import best, expected_length, predict, run_ahead_bound, theorem_3_8


def test_the_formulas_give_the_published_figures() -> None:
    # Leviathan et al.: alpha 0.8, k 5, a free draft: 3.69x.
    assert theorem_3_8(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
    assert theorem_3_8(0.6, 1, 0.2) == pytest.approx((1 + 0.6) / (1 + 0.2))
    assert expected_length(1.0, 4) == 5.0


def test_running_ahead_gains_the_drafting_time_while_it_fits_behind_the_target() -> None:
    assert run_ahead_bound(0.7, 4, 0.1) == pytest.approx(theorem_3_8(0.7, 4, 0.1) * (1 + 4 * 0.1))
    assert run_ahead_bound(0.7, 9, 0.2) == pytest.approx(expected_length(0.7, 9) / 2)


def test_the_best_k_is_the_highest_speedup() -> None:
    acceptance = Acceptance([[True, True, True, False] * 10])
    predictions = predict(acceptance, c=0.2)
    assert best(predictions).speedup == max(p.speedup for p in predictions)
    assert [p.k for p in predictions] == list(range(1, 13))
