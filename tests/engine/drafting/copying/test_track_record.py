"""TrackRecord: rates follow what was accepted lately, each length of match by itself."""

from engine.drafting.copying.track_record import TrackRecord


def test_longer_matches_are_expected_to_go_on_more_often_before_anything_is_known():
    rates = [TrackRecord().rate(length) for length in (1, 2, 4, 8, 16, 32, 100)]
    assert rates == sorted(rates)
    assert rates[0] == rates[1] < rates[2] < rates[3]
    assert rates[-1] == rates[-2]


def test_a_rate_follows_the_verdicts():
    record = TrackRecord()
    for _ in range(200):
        record.observe(2, 1, 1)
    assert record.rate(3) > 0.9
    assert record.rate(4) == TrackRecord().rate(4)
    for _ in range(200):
        record.observe(2, 1, 0)
    assert record.rate(2) < 0.5


def test_tokens_after_the_first_rejected_one_do_not_count():
    record, other = TrackRecord(), TrackRecord()
    record.observe(2, 8, 1)
    other.observe(2, 2, 1)
    assert [record.rate(n) for n in (2, 4, 8)] == [other.rate(n) for n in (2, 4, 8)]


def test_a_length_that_is_not_drafted_from_any_more_is_tried_again_after_a_while():
    record = TrackRecord()
    for _ in range(300):
        record.observe(2, 1, 0)
    low = record.rate(2)
    assert low < 0.05
    for _ in range(1000):
        record.observe_skip(2)
    assert record.rate(2) > 0.2
