"""The engine over a model that reads its whole context out of the blocks: any slip in them changes the text."""

import asyncio
import contextlib
import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import METHODS
from engine.errors import DrafterError, TargetError
from engine.params import SamplingParams
from tests.engine.drafting.proposing import Failing
from tests.engine.hybrids.memory import StateVerifier
from tests.engine.running import drafters, expected_tokens, make_engine
from tests.engine.targets import OrderedTarget, SlowDrafter, alternate
from tests.fakes import ContextModel, SelfDraftingModel

STATES, VOCAB, EOS = 13, 7, 6


def context_model(seed=0, *, sharpness=2.5):
    weights = torch.randn(STATES, VOCAB, generator=torch.Generator().manual_seed(seed)) * sharpness
    return ContextModel(weights.softmax(-1), [EOS])


MODEL = context_model()
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 5),
    max_tokens=st.integers(1, 20),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    stop_token_ids=st.sampled_from([[], [3]]),
    min_tokens=st.sampled_from([0, 1]),
    ignore_eos=st.booleans(),
    num_speculative_tokens=st.sampled_from([None, 0, 2]),
)
PROMPTS = st.builds(
    lambda prefix, rest: [*prefix, *rest],
    st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 0, 1, 2, 2]]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go, and lose their memory; what is committed is always the beginning of the request's own text.

    One round is in flight, or two; the number changes at any time.
    """

    @initialize(
        draft=st.sampled_from(["none", "the target itself", "a random draft", "forgetful", "trees", "suffixes"]),
        num_blocks=st.sampled_from([8, 11, 40]),
        budget=st.sampled_from([3, 9, 64]),
        sharing=st.booleans(),
        k=st.integers(1, 5),
    )
    def start(self, draft, num_blocks, budget, sharing, k):
        self._make(draft, num_blocks, budget, sharing, k)

    def _make(self, draft, num_blocks, budget, sharing, k, **settings):
        self.engine = make_engine(
            MODEL,
            drafters(MODEL, context_model(1), tokens=range(VOCAB)).get(draft),
            num_blocks=num_blocks,
            block_size=4,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            enable_prefix_caching=sharing,
            num_speculative_tokens=k,
            **settings,
        )
        self.kv = self.engine.verifier.kv
        self.model = self.engine.verifier
        self.engine.verifier = self.target = OrderedTarget(self.model, self.engine.scheduler)
        self.engine.drafter = self.drafter = SlowDrafter(self.engine.drafter)
        self.requests, self.expected, self.seen, self.ended = {}, {}, {}, set()
        self.loop = asyncio.new_event_loop()

    def _run(self, coroutine):
        async def within_a_minute():
            async with asyncio.timeout(60):
                return await coroutine

        return self.loop.run_until_complete(within_a_minute())

    @rule(prompt=PROMPTS, params=PARAMS, salt=st.sampled_from([None, "a", "b"]))
    def add(self, prompt, params, salt):
        name = str(len(self.expected))
        room = self.engine.scheduler.pool.num_blocks * 4 - len(prompt)
        self.engine.add(name, prompt, params, cache_salt=salt)
        self.requests[name] = prompt, params, salt
        self.expected[name] = expected_tokens(MODEL, prompt, params)[:room]
        self.seen[name] = []

    @rule(num_cohorts=st.sampled_from([1, 2, 2]), verify=st.integers(0, 5), draft=st.integers(0, 5))
    def change_how_many_rounds_are_in_flight_and_how_long(self, num_cohorts, verify, draft):
        alternate(self.engine, num_cohorts)
        self.target.delay, self.drafter.delay = verify, draft

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self._note(self._run(self.engine.step()))

    @rule(count=st.integers(1, 3))
    def run_rounds_whose_outputs_are_taken_later(self, count):
        for _ in range(count):
            self._run(self.engine.run_round())

    async def _step_until(self, turns, act):
        """Begin a round, and act some turns of the event loop later, or once it has ended."""
        step = asyncio.create_task(self.engine.step())
        for _ in range(turns):
            await asyncio.sleep(0)
        if step.done():
            self._note(step.result())
            act(step)
            return
        act(step)
        with contextlib.suppress(asyncio.CancelledError):
            self._note(await step)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), turns=st.integers(0, 12), count=st.integers(1, 4))
    def abort_within_a_round(self, data, turns, count):
        names = data.draw(st.lists(st.sampled_from(sorted(self.expected)), min_size=count, max_size=count))

        def abort(_):
            for name in names:
                self.engine.abort(name)
                self.ended.add(name)

        self._run(self._step_until(turns, abort))

    @rule(turns=st.integers(0, 12))
    def cancel_a_round(self, turns):
        self._run(self._step_until(turns, lambda step: step.cancel()))

    @rule()
    def draft_something_malformed(self):
        self.drafter.is_wrong = True
        with contextlib.suppress(DrafterError):
            self._note(self._run(self.engine.step()))
        self.drafter.is_wrong = False

    @precondition(lambda self: self.expected.keys() - self.ended)
    @rule(data=st.data())
    def go_on_under_another_name(self, data):
        """As when the engine that sent the first tokens has died."""
        name = data.draw(st.sampled_from(sorted(self.expected.keys() - self.ended)))
        prompt, params, salt = self.requests[name]
        self.engine.abort(name)
        self.ended.add(name)
        again = str(len(self.expected))
        self.engine.add(again, prompt, params, cache_salt=salt, output_token_ids=self.seen[name])
        self.requests[again], self.expected[again] = self.requests[name], self.expected[name]
        self.seen[again] = [*self.seen[name]]

    @rule()
    def lose_the_targets_memory(self):
        self.target.restart()
        for cache in (*self.kv.keys, *self.kv.values):
            cache.fill_(5)
        self.engine.reset()

    @precondition(lambda self: self.engine.has_work)
    @rule(when=st.sampled_from(["before", "after"]), nth=st.integers(0, 1), dies=st.booleans())
    def lose_a_round(self, when, nth, dies):
        """Of two in flight, either."""
        self.target.faults.extend([None] * nth + [when])
        self.target.dies = dies
        try:
            for _ in range(2 + nth):
                self._note(self._run(self.engine.step()))
        except TargetError:
            if dies:
                self.lose_the_targets_memory()
        self.target.faults.clear()

    def _note(self, outputs):
        for output in outputs:
            assert output.request_id not in self.ended
            self.seen[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert self.seen[output.request_id] == self.expected[output.request_id]
                self.ended.add(output.request_id)

    @invariant()
    def committed_tokens_begin_the_requests_own_text(self):
        for name in getattr(self, "seen", {}):
            assert self.seen[name] == self.expected[name][: len(self.seen[name])]

    @invariant()
    def every_block_is_free_or_owned(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        in_flight = [row.request for row in self.target.last] if self.engine._rounds.is_in_flight else []
        for sequence in scheduler.running:
            assert sequence.is_in_flight == any(sequence.request is request for request in in_flight)
        owned = {block for sequence in scheduler.running for block in sequence.block_ids}
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks - len(owned)
        assert 0 not in owned
        assert all(not sequence.block_ids for sequence in scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._note(self._run(self.engine.step()))
        self._note(self.engine.take_outputs())
        self.target.restart()
        self._run(asyncio.sleep(0))
        self.loop.close()
        assert not self.engine.has_work
        assert self.ended == set(self.expected)
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=25, derandomize=True, suppress_health_check=list(HealthCheck)
)


class StatefulEngineMachine(EngineMachine):
    """The same for a model with linear layers: every row starts from the state of its context, and of no other."""

    @initialize(
        draft=st.sampled_from(["none", "the target itself", "forgetful", "trees"]),
        num_blocks=st.sampled_from([8, 11, 40]),
        budget=st.sampled_from([1, 3, 9, 64]),
        sharing=st.sampled_from([True, True, False]),
        k=st.integers(0, 5),
        state_chunk=st.sampled_from([1, 2, 4, 6, 8]),
        num_states=st.sampled_from([1, 2, 5, 12]),
    )
    def start(self, draft, num_blocks, budget, sharing, k, state_chunk, num_states):
        self._make(draft, num_blocks, budget, sharing, k, state_chunk=state_chunk, num_states=num_states)
        self.target.verifier = self.states = StateVerifier(self.engine.scheduler, self.model)

    @rule()
    def lose_the_targets_memory(self):
        self.states.memory.lose()
        super().lose_the_targets_memory()

    @invariant()
    def every_slot_is_free_or_owned(self):
        if hasattr(self, "states"):
            self.states.memory.check_owned(self.engine.scheduler)
            self.states.memory.check_cached()


TestStatefulEngineMachine = StatefulEngineMachine.TestCase
TestStatefulEngineMachine.settings = settings(TestEngineMachine.settings, max_examples=80)


@pytest.mark.parametrize("drafting", ["model", "tree", "self"])
@pytest.mark.parametrize("num_cohorts", [1, 2])
async def test_a_draft_pass_that_fails_costs_its_round_alone(drafting, num_cohorts):
    """The draft is the target, so every later draft is accepted whole; few nodes of a tree are siblings."""
    model = SelfDraftingModel(MODEL.laws, MODEL.laws, [EOS])
    failing = model.thinned = Failing(model.thinned if drafting == "self" else ContextModel(MODEL.laws, [EOS]))
    settings = {"drafting": drafting, "self_draft_layers": 1 if drafting == "self" else None}
    make = None if drafting == "self" else lambda config: METHODS[drafting].make(config, DraftModel(failing))
    engine = make_engine(model, make, num_speculative_tokens=4, block_size=4, **settings)
    alternate(engine, num_cohorts)
    requests = [([nth, 1, 2], SamplingParams(seed=nth, max_tokens=200, ignore_eos=True)) for nth in range(4)]
    for nth, request in enumerate(requests):
        engine.add(str(nth), *request)
    seen, accepted = {str(nth): [] for nth in range(4)}, {turn: [] for turn in range(6)}
    for nth_round in itertools.count():
        if not engine.has_work:
            break
        if nth_round % 6 == 0:
            failing.num_left = nth_round // 6 % 5
        try:
            outputs = await engine.step()
        except RuntimeError:
            continue
        for output in outputs:
            seen[output.request_id] += output.token_ids
            if len(seen[output.request_id]) < 190:
                accepted[nth_round % 6].append(output.num_accepted_tokens)
    assert seen == {str(nth): expected_tokens(MODEL, *request) for nth, request in enumerate(requests)}
    assert len(accepted[0]) < len(accepted[5]), "no pass has failed"
    assert min(accepted[4] + accepted[5]) >= (3 if drafting == "tree" else 4)
