"""A plan's length for a request: a copy's, its own, or the round's, within what the request allows."""

import pytest

from engine.control.plan import Plan, limited
from engine.params import SamplingParams
from engine.protocols import Request


def request(name, length=None, *, fixed=False):
    params = SamplingParams(num_speculative_tokens=length, fixes_draft_length=fixed)
    return Request(name, [1], 1, params)


@pytest.mark.parametrize(
    ("name", "limit", "fixed", "expected"),
    [
        ("copying", None, False, 9),
        ("own", None, False, 2),
        ("other", None, False, 4),
        ("copying", 5, False, 5),
        ("own", 3, False, 2),
        ("other", 0, False, 0),
        ("other", 7, True, 7),
        ("copying", 7, True, 7),
    ],
)
def test_a_request_gets_its_length_within_its_limits(name, limit, fixed, expected):
    plan = Plan(4, copies={"copying": 9}, lengths={"own": 2})
    assert plan.length_of(request(name, limit, fixed=fixed)) == expected


def test_a_limit_shortens_and_a_fixed_length_decides():
    assert [limited(request("a", 3), 5), limited(request("a", 3), 1), limited(request("a", 3, fixed=True), 1)] == [
        3,
        1,
        3,
    ]
