"""Named devices: what is known of real passes, and how long rounds last."""

import pytest

from tests.bench.paced.roofline import PASS_S, Hardware, Model, PacedDevice, Pair, decoding

MS = 1e-3


@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [
        ("h100-1b", 0.82),  # 2.5 GB at 3.0 TB/s
        ("h100-8b", 5.0),  # 15 GB at 3.0 TB/s
        ("h100x4-70b", 14.5),  # 139 GB over four, and 3 ms of all-reduces
        ("l4-1b", 9.1),
    ],
)
def test_a_pass_over_one_row_is_bound_by_reading_the_weights(name, expected_ms):
    assert PacedDevice.of(name).pass_seconds(decoding(1, 1, 200)) * 1e3 == pytest.approx(expected_ms, rel=0.04)


def pair_of(target: tuple[float, float], draft_ms: float) -> Pair:
    """A target whose pass takes the first, or the second for each of its tokens, if that is more; a draft's pass."""

    def device(read_ms: float, token_ms: float) -> PacedDevice:
        flops = 2e9 / (token_ms * MS) if token_ms else 1e30
        return PacedDevice(Model(1e9, 0.0, 1, 0, 0), Hardware(2e9 / (read_ms * MS - PASS_S), flops, 1.0, 0.0))

    return Pair(device(*target), device(draft_ms, 0.0))


@pytest.mark.parametrize(
    ("pair", "rows", "k", "overlap", "hit_rate", "expected_ms"),
    [
        (pair_of((10.0, 0.0), 1.0), 8, 4, "none", 1.0, 14),
        (pair_of((10.0, 0.0), 1.0), 8, 4, "ahead", 1.0, 10),
        (pair_of((10.0, 0.0), 1.0), 1, 12, "ahead", 1.0, 13),  # 12, and the guess of the token after them
        (pair_of((10.0, 0.0), 1.0), 2, 4, "ahead", 0.5, 0.25 * 10 + 0.75 * 14),
        (pair_of((10.0, 0.0), 1.0), 8, 4, "alternate", 1.0, 20),  # both cohorts wait for the weights
        (pair_of((1.0, 0.5), 1.0), 16, 4, "alternate", 1.0, 40),  # 16 rows of 5 tokens: 40 ms
        (pair_of((1.0, 0.5), 10.0), 16, 4, "alternate", 1.0, 80),  # the draft is never idle
    ],
)
def test_a_round_lasts_for_what_does_not_overlap(pair, rows, k, overlap, hit_rate, expected_ms):
    assert pair.overlapped_s(rows, k, overlap, hit_rate) == pytest.approx(expected_ms * MS, rel=1e-2)
    assert pair.bound(rows, k, 1000) == 1 + pair.draft_s(rows, k) / pair.target_s(rows, k)
