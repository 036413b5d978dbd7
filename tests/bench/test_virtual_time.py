"""Virtual time: passes queue on their lane, and requests reach a draft that runs ahead in the middle of one."""

import pytest

from engine.config import EngineConfig
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.execution.batch import ForwardRow, build
from engine.llm import run_in_process
from engine.protocols import ProposeRow, Request
from engine.sampling.params import SamplingParams
from tests.bench.simulation import Costs, Plane, laws
from tests.bench.virtual_time import Delays, Lane, PricedBackend, SimulatedDrafter
from tests.fakes import ContextModel

COSTS = Costs(Plane(20.0), Plane(2.0), network_ms=0.5, overhead_ms=1.0, acceptance=0.8, rank_exponent=1.0)
MODEL = ContextModel(laws(COSTS)[1])
CONFIG = EngineConfig(num_speculative_tokens=4, max_num_seqs=1, num_blocks=64)
DELAYS = Delays(network_s=0.5, draft_s=0.25)


def priced(lane: Lane) -> PricedBackend:
    return PricedBackend(MODEL, lane, lambda batch: 2.0)


def rows(num_tokens: int, k: int = 4) -> list[ProposeRow]:
    request = Request("a", list(range(num_tokens)), 3, SamplingParams(temperature=0, seed=1))
    return [ProposeRow(request, k)]


def test_passes_follow_each_other_and_the_host_goes_on_until_it_waits() -> None:
    lane = Lane()
    backend = priced(lane)
    batch = build([ForwardRow([1], 0, [1], 1)], backend.allocate_kv(4, 16))
    backend.run(batch)
    backend.run(batch)
    assert (lane.now, backend.is_busy) == (0.0, True)
    lane.now = 1.0
    backend.wait()
    assert (lane.now, backend.is_busy) == (4.0, False)
    lane.now = 5.0
    backend.run(batch)
    backend.wait()
    assert lane.now == 7.0


def test_a_draft_takes_its_passes_and_both_ways() -> None:
    router, lane = Lane(), Lane()
    model = priced(lane)
    drafter = SimulatedDrafter(ModelDrafter(model, CONFIG), model, router, lane, DELAYS)
    router.now = 10.0
    assert run_in_process(drafter.propose(rows(3, 0))) == [run_in_process(drafter.propose(rows(3, 0)))[0]]
    assert router.now == 10.0  # nobody was asked for anything
    run_in_process(drafter.propose(rows(3)))
    assert router.now == pytest.approx(10.0 + 0.5 + 4 * 2.0 + 0.25 + 0.5)


def test_between_requests_the_draft_runs_ahead_and_what_it_prepared_is_there_at_once() -> None:
    router, lane = Lane(), Lane()
    model = priced(lane)
    ahead = RunAheadDrafter(model, CONFIG, clock=lane)
    drafter = SimulatedDrafter(ahead, model, router, lane, DELAYS)
    first = rows(3)
    (draft,) = run_in_process(drafter.propose(first))
    accepted = [*first[0].request.token_ids, *draft.token_ids]
    request = Request("a", [*accepted, int(MODEL.law(accepted).argmax())], 3, first[0].request.params)
    router.now += 40.0
    asked = router.now
    run_in_process(drafter.propose([ProposeRow(request, 4)]))
    assert ahead.stats.num_forwards > 4
    assert ahead.stats.hits == 1
    assert router.now == pytest.approx(asked + 0.5 + 0.25 + 0.5)


def test_a_request_finds_only_what_was_prepared_before_it() -> None:
    router, lane = Lane(), Lane()
    model = priced(lane)
    ahead = RunAheadDrafter(model, CONFIG, clock=lane)
    drafter = SimulatedDrafter(ahead, model, router, lane, DELAYS)
    run_in_process(drafter.propose(rows(3)))
    answered = lane.now
    router.now = answered + 1.0 - DELAYS.network_s
    run_in_process(drafter.propose(rows(4)))
    assert ahead.stats.num_forwards == 1
    assert lane.now > answered + 2.0
