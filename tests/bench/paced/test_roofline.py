"""Named devices: what is known of real passes, and the names."""

import pytest

from tests.bench.paced.datasheet import HARDWARE, PASS_S, Hardware, Model, Placed, decoding
from tests.bench.paced.roofline import MODELS, PacedDevice, Pair


@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [
        ("h100-1b", 0.82),  # 2.5 GB at 3.0 TB/s
        ("h100-8b", 5.0),  # 15 GB at 3.0 TB/s
        ("h100x4-70b", 14.5),  # 139 GB over four, and 3 ms of all-reduces
        ("h200x4-70b", 11.0),
        ("a100-8b", 8.2),
        ("l4-1b", 9.1),
    ],
)
def test_a_pass_over_one_row_is_bound_by_reading_the_weights(name, expected_ms):
    assert PacedDevice.of(name).pass_seconds(decoding(1, 1, 200)) * 1e3 == pytest.approx(expected_ms, rel=0.04)


def test_a_pairs_passes_are_its_devices_and_the_bound_hides_the_draft():
    pair = Pair.of("h100x4-70b+l4-1b")
    verify_s = Placed(MODELS["70b"], HARDWARE["h100"], 4).pass_seconds(decoding(8, 5, 300))
    draft_s = 4 * Placed(MODELS["1b"], HARDWARE["l4"]).pass_seconds(decoding(8, 1, 300))
    assert (pair.target_s(8.2, 4, 300.4), pair.draft_s(8.2, 4, 300.4)) == (verify_s, draft_s)
    assert pair.bound(8, 4, 300) == 1 + draft_s / verify_s
    assert Pair.of("h100-8b").draft == Pair.of("h100-8b").target
    assert (pair.target.num_gpus, pair.name) == (4, "h100x4-70b+l4-1b")


MS = 1e-3


def pair_of(target: tuple[float, float], draft_ms: float) -> Pair:
    """A target whose pass takes the first, or the second for each of its tokens, if that is more; a draft's pass."""

    def device(read_ms: float, token_ms: float) -> PacedDevice:
        weights = 1e9
        hardware = Hardware(
            2 * weights / (read_ms * MS - PASS_S), 2 * weights / (token_ms * MS) if token_ms else 1e30, 1.0, 0.0
        )
        return PacedDevice(Model(weights, 0.0, 1, 0, 0), hardware)

    return Pair(device(*target), device(draft_ms, 0.0))


def test_a_round_lasts_for_what_does_not_overlap():
    few = pair_of((10.0, 0.0), 1.0)
    assert few.round_s(8, 4) == pytest.approx(14 * MS)
    assert few.round_s(8, 4, hit_rate=1.0) == pytest.approx(10 * MS)
    assert few.round_s(1, 12, hit_rate=1.0) == pytest.approx(13 * MS)  # 12, and the guess of the token after them
    assert few.round_s(1, 4, hit_rate=0.9) == pytest.approx((0.9 * 10 + 0.1 * 14) * MS)
    assert few.round_s(2, 4, hit_rate=0.5) == pytest.approx((0.25 * 10 + 0.75 * 14) * MS)


def test_alternating_gains_where_half_of_the_rows_take_half_of_the_time():
    few, many = pair_of((10.0, 0.0), 1.0), pair_of((1.0, 0.5), 1.0)
    assert few.overlapped_s(8, 4, "alternate", 1.0) == pytest.approx(20 * MS)  # both cohorts wait for the weights
    assert many.overlapped_s(16, 4, "none", 1.0) == pytest.approx(44 * MS, rel=1e-2)  # 16 rows of 5 tokens: 40 ms
    assert many.overlapped_s(16, 4, "ahead", 1.0) == pytest.approx(40 * MS, rel=1e-2)
    assert many.overlapped_s(16, 4, "alternate", 1.0) == pytest.approx(40 * MS, rel=1e-2)
    slow = pair_of((1.0, 0.5), 10.0)
    assert slow.overlapped_s(16, 4, "alternate", 1.0) == pytest.approx(80 * MS, rel=1e-2)  # the draft is never idle
    uneven = pair_of((1.0, 0.5), 8.0)
    assert uneven.overlapped_s(4, 4, "alternate", 1.0) == pytest.approx(64 * MS, rel=1e-2)
    assert uneven.overlapped_s(16, 1, "alternate", 1.0) == pytest.approx(16 * MS, rel=2e-2)  # 8 + 8: neither always
