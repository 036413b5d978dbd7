"""What a burst's answers become in its table."""

from tests.bench.burst import Answers


def test_answers_are_told_by_status_in_milliseconds() -> None:
    answers = Answers()
    for number in range(1, 101):
        answers.add(429, number / 1000, "7")
    answers.add(200, 1.5, None)
    assert answers.row(429) == ("100", "50", "100", "100")
    assert answers.row(200) == ("1", "1,500", "1,500", "1,500")
    assert answers.row(503) == ("0", "-", "-", "-")
    assert answers.retry_after == [7] * 100
