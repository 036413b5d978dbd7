"""An SLO is kept by requests, not by percentiles."""

import pytest

from tests.load.records import Record
from tests.load.slo import Slo, parse_limits


def answered(ttft_s: float, tpot_s: float = 0.01, outcome: str = "ok") -> Record:
    return Record(0, "d", 0.0, 0.0, outcome=outcome, chunks=[(ttft_s, 1), (ttft_s + 10 * tpot_s, 11)], num_tokens=11)


def test_limits_are_read_with_either_sign() -> None:
    assert parse_limits("ttft=500, tpot=50.5") == (("ttft", 500.0), ("tpot", 50.5))
    assert parse_limits("e2e:9000") == (("e2e", 9000.0),)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=x", "speed=5", "tpot=0", "tpot=-1", "tpot=nan"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_limits(text)


def test_a_good_request_keeps_all_limits() -> None:
    slo = Slo((("ttft", 500.0), ("tpot", 20.0)), 0.5)
    assert slo.is_good(answered(0.5))
    assert not slo.is_good(answered(0.51))
    assert not slo.is_good(answered(0.1, tpot_s=0.021))
    assert not slo.is_good(answered(0.1, outcome="429"))


def test_the_slowest_token_counts_for_itl() -> None:
    stalled = Record(0, "d", 0.0, 0.0, chunks=[(0.1, 1), (0.2, 2), (1.2, 3)], num_tokens=3)
    assert Slo((("itl", 1001.0),), 1.0).is_good(stalled)
    assert not Slo((("itl", 999.0),), 1.0).is_good(stalled)


def test_refused_requests_count_against_the_share() -> None:
    slo = Slo((("ttft", 500.0),), 0.75)
    records = [answered(0.1)] * 3 + [answered(0.1, outcome="429")]
    assert slo.share(records) == 0.75
    assert slo.is_met(records)
    assert not slo.is_met([*records, answered(0.1, outcome="500")])
    assert not slo.is_met([])


def test_a_single_token_has_no_time_per_token_to_miss() -> None:
    assert Slo((("tpot", 1.0),), 1.0).is_good(Record(0, "d", 0.0, 0.0, chunks=[(5.0, 1)], num_tokens=1))
