"""Requests that fix their draft length get drafts of that length, whatever the control chooses for others."""

from collections import Counter

import pytest

from engine.params import SamplingParams
from tests.engine.running import make_engine, run_outputs
from tests.engine.test_exactness import TARGET
from tests.fakes import ConstantDrafter

K = 4


@pytest.mark.parametrize("length", [0, 3, K])
def test_a_fixed_length_is_drafted_in_every_round(length):
    """By a drafter that is nearly always wrong, so that the control would choose no drafts."""
    engine = make_engine(TARGET, lambda _: ConstantDrafter(0), speculation="adaptive", num_speculative_tokens=K)
    params = SamplingParams(
        seed=1, max_tokens=60, ignore_eos=True, num_speculative_tokens=length, fixes_draft_length=True
    )
    rounds = run_outputs(engine, [([1, 2, 3], params)])["0"]
    # The last rounds of a text draft less.
    assert {output.num_draft_tokens for output in rounds[1:-K]} == {length}
    reasons = Counter()
    for (chosen, reason), count in engine.stats.num_rounds_by_length.items():
        reasons[reason] += count
        assert reason != "request" or chosen == length
    assert reasons["request"] == len(rounds) - 1  # all but that of the prompt
