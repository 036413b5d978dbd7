"""What a recorded step in load becomes: its figures, and a picture."""

from pathlib import Path

from tests.bench.autoscaling import MAX_NUM_SEQS, Recording, Sample, draw


def sample(time_s: float, num_wanted: int, num_serving: int) -> Sample:
    running = {"a": 8.0, "b": 4.0} if num_serving == 2 else {"a": 8.0}
    return Sample(time_s, running, 4.0, num_wanted, num_serving)


RECORDING = Recording(
    [sample(*numbers) for numbers in ((-1.0, 1, 1), (2.0, 2, 1), (3.0, 2, 1), (9.0, 2, 2), (40.0, 1, 2), (41.0, 1, 1))],
    [5.0, *[0.1] * MAX_NUM_SEQS, 9.0, 7.0],
    ended_s=31.0,
)


def test_figures_count_from_the_step() -> None:
    assert (RECORDING.decided_s, RECORDING.second_s, RECORDING.back_after_s) == (2.0, 9.0, 9.0)
    assert RECORDING.waited_s == [5.0, 7.0, 9.0]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw({"one": RECORDING, "two": RECORDING}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
