"""Two rounds in flight: which requests each computes, what ends them, and their texts' law."""

import itertools
from collections import Counter
from dataclasses import replace

from engine.laws import p_value
from engine.params import SamplingParams
from tests.engine.running import SAMPLING, chains, expected_tokens, make_engine
from tests.engine.targets import alternate, alternating
from tests.engine.test_exactness import LAWS, LENGTH, PROMPT, TARGET, UNLIKE, joint_law


def make_alternating(*arguments, **settings):
    return alternating(make_engine(*arguments, **settings))


async def texts_of(engine, requests=()):
    """Generate everything; return the tokens per request."""
    for nth, (prompt, params) in enumerate(requests):
        engine.add(str(nth), prompt, params)
    texts = {str(nth): [] for nth in range(len(requests))}
    while engine.has_work:
        for output in await engine.step():
            texts[output.request_id] += output.token_ids
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert engine.verifier.most == 2
    return texts


async def test_the_law_of_two_cohorts_is_that_of_the_target():
    engine = make_alternating(TARGET, chains(UNLIKE), **SAMPLING, verification="block")
    params = replace(LAWS["penalties"], max_tokens=LENGTH + 2, ignore_eos=True)
    texts = await texts_of(engine, [(PROMPT, replace(params, seed=seed)) for seed in range(600)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, joint_law(LAWS["penalties"])) > 1e-5
    assert engine.stats.num_drafts > 0


def long_requests(count):
    return [([nth % 5, 1, 2], SamplingParams(seed=nth, max_tokens=24, ignore_eos=True)) for nth in range(count)]


async def test_cohorts_become_equal_while_requests_wait_for_blocks():
    """The first round has taken the blocks of most of those that start at once."""
    engine = make_alternating(TARGET, None, num_speculative_tokens=0, num_blocks=60, block_size=4)
    await texts_of(engine, [([nth % 5, 1, 2] * 3, request) for nth, (_, request) in enumerate(long_requests(64))])
    assert engine.verifier.sizes[1:7] == [10] * 6
    sizes = engine.verifier.sizes[1:40]
    assert max(abs(one - other) for one, other in itertools.pairwise(sizes)) <= 2


async def test_a_switch_to_one_cohort_ends_the_round_in_flight_before_it_drafts():
    engine = make_alternating(TARGET, chains(UNLIKE), num_speculative_tokens=2)
    requests, texts = long_requests(6), {str(nth): [] for nth in range(6)}
    for nth, request in enumerate(requests):
        engine.add(str(nth), *request)
    for nth in range(12):
        alternate(engine, 1 + nth // 2 % 2)
        before = len(engine.verifier.sizes)
        called = []
        await engine.run_round(meanwhile=lambda: called.append(None))  # noqa: B023
        assert len(called) == 1
        assert len(engine.verifier.sizes) - before == [0 if nth else 1, 1, 2, 1][nth % 4]
        for output in engine.take_outputs():
            texts[output.request_id] += output.token_ids
    while engine.has_work:
        for output in await engine.step():
            texts[output.request_id] += output.token_ids
    assert texts == {str(nth): expected_tokens(TARGET, *request) for nth, request in enumerate(requests)}


async def test_outputs_can_be_delivered_while_the_drafter_works():
    engine = make_alternating(TARGET, chains(UNLIKE), num_speculative_tokens=2)
    for nth, request in enumerate(long_requests(4)):
        engine.add(str(nth), *request)
    await engine.step()
    propose, noted = engine.drafter.propose, []

    async def noting(rows):
        noted.append("propose")
        return await propose(rows)

    engine.drafter.propose = noting
    await engine.run_round(meanwhile=lambda: noted.append("deliver"))
    assert noted == ["deliver", "propose"]
    alternate(engine, 1)
    await engine.run_round()  # ends what is in flight
    noted.clear()
    await engine.run_round(meanwhile=lambda: noted.append("deliver"))
    assert noted == ["propose", "deliver"]
