"""Histograms of requests that are timed with a clock that is set by hand."""

import pytest

from engine.params import SamplingParams
from engine.stats.requests import Distribution, token_bounds
from tests.engine.running import make_engine, step
from tests.engine.test_engine import MODEL
from tests.fakes import Clock


@pytest.fixture
def clock():
    return Clock()


class TakingTime:
    """Passes rounds on; each takes so many seconds."""

    def __init__(self, verifier, clock):
        self.verifier, self.clock = verifier, clock
        self.seconds = 1.0

    async def verify(self, rows):
        self.clock.now += self.seconds
        return await self.verifier.verify(rows)

    def release(self, request_id):
        self.verifier.release(request_id)


def timed_engine(clock, **settings):
    engine = make_engine(MODEL, block_size=4, clock=clock, **settings)
    engine.verifier = TakingTime(engine.verifier, clock)
    return engine


def params(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def only(distribution):
    """The sum and the number of all values."""
    return distribution.total, distribution.cumulative[-1]


def test_a_value_counts_for_its_bound_and_all_above():
    distribution = Distribution((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        distribution.observe(value)
    assert distribution.cumulative == [2, 3, 4, 5]
    assert distribution.total == 14


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, [1]), (4, [1, 2, 5]), (512, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])]
)
def test_bounds_of_token_counts_reach_the_context(most, bounds):
    assert list(token_bounds(most)) == bounds


def test_a_request_waits_computes_its_prompt_and_decodes(clock):
    """One sequence at a time, two tokens of a prompt per round: 3 s of prompt, then a token each second."""
    engine = timed_engine(clock, max_num_seqs=1, max_num_batched_tokens=2)
    engine.add("a", [1, 2, 3, 4, 5], params(3))
    clock.now = 10.0
    engine.add("b", [5, 4, 3, 2, 1], params(1))
    while engine.has_work:
        step(engine)
    stats = engine.request_stats
    assert only(stats.queue_s) == (10 + 5, 2)  # b starts when a ends, at 15 s
    assert only(stats.prefill_s) == (3 + 3, 2)
    assert only(stats.decode_s) == (2 + 0, 2)
    assert only(stats.inter_token_s) == (2, 2)
    assert only(stats.output_token_s) == (1 + 0, 2)
    assert only(stats.num_prompt_tokens) == (10, 2)
    assert only(stats.num_output_tokens) == (4, 2)
    assert only(stats.num_round_tokens) == (2 + 2 + 1 + 1 + 1 + 2 + 2 + 1, 8)


def test_cached_tokens_are_looked_up_and_not_computed(clock):
    engine = timed_engine(clock)
    prompt = [1, 2, 3, 4, 5, 0, 1, 2, 2, 4]
    for name in "abc":
        engine.add(name, prompt, params(1), cache_salt="c" if name == "c" else None)
        step(engine)
    stats = engine.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_cached_prompt_tokens) == (30, 8, 8)
    assert only(engine.request_stats.num_computed_tokens) == (10 + 2 + 10, 3)
