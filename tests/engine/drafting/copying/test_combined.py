"""CombinedDrafter: which source drafts a row, and that the text does not depend on it."""

import itertools

import numpy as np
import pytest
import torch

from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.params import SamplingParams
from engine.protocols import PlansCopies, ProposeRow, Request, chain, run_in_process
from tests.engine.running import expected_tokens, make_engine, run
from tests.engine.test_exactness import TARGET, UNLIKE
from tests.fakes import ConstantDrafter, MarkovModel

TOKENS = list(range(10, 70))
GAINS = [0.7**place for place in range(1, 5)]


def cycle_model(length):
    """A model that counts up to a length and begins again."""
    return MarkovModel(torch.eye(length).roll(1, 1))


class CountingDrafter(ConstantDrafter):
    """Proposes one token over and over; keeps the lengths that it was asked for."""

    def __init__(self):
        super().__init__(5)
        self.calls = []
        self.released = []

    async def propose(self, rows):
        self.calls.append([row.num_draft_tokens for row in rows])
        return await super().propose(rows)

    def release(self, request_id):
        self.released.append(request_id)


def row(name, prompt, output=(), count=8):
    return ProposeRow(Request(name, [*prompt, *output], len(prompt), SamplingParams(max_tokens=100)), count)


def make():
    model = CountingDrafter()
    return CombinedDrafter(model, SuffixDrafter()), model


def propose(drafter, rows, num_model_tokens=2, gains=GAINS):
    expected = {row.request.request_id: sum(gains[: min(row.num_draft_tokens, num_model_tokens)]) for row in rows}
    copies = drafter.plan_copies(rows, expected)
    asked = [
        ProposeRow(row.request, copies.get(row.request.request_id, min(num_model_tokens, row.num_draft_tokens)))
        for row in rows
    ]
    return copies, run_in_process(drafter.propose(asked))


def test_a_long_match_is_copied_and_the_model_is_not_called():
    drafter, model = make()
    assert isinstance(drafter, PlansCopies)
    copies, drafts = propose(drafter, [row("a", TOKENS, TOKENS[:40])])
    assert copies == {"a": 8}
    assert drafts == [chain(TOKENS[40:48])]
    assert model.calls == []


def test_a_short_match_promises_less_than_the_model():
    drafter, model = make()
    copies, drafts = propose(drafter, [row("a", [1, 2, 3, 4, 1, 2])])
    assert (copies, drafts, model.calls) == ({}, [chain([5, 5])], [[2]])


def test_each_row_of_a_batch_has_a_source_of_its_own():
    drafter, model = make()
    rows = [row("a", [1, 2, 3]), row("b", TOKENS, TOKENS[:40], count=3), row("c", [4])]
    copies, drafts = propose(drafter, rows)
    assert copies == {"b": 3}
    assert drafts == [chain([5, 5]), chain(TOKENS[40:43]), chain([5, 5])]
    assert model.calls == [[2, 2]]


def test_a_row_whose_client_leaves_while_the_model_drafts_takes_no_other_rows_draft():
    class Leaving(CountingDrafter):
        async def propose(self, rows):
            drafts = await super().propose(rows)
            drafter.release("copies")
            return drafts

    drafter = CombinedDrafter(Leaving(), SuffixDrafter())
    rows = [row("copies", TOKENS, TOKENS[:20]), row("drafts", [7, 8, 9])]
    _, (copied, drafted) = propose(drafter, rows)
    assert copied.token_ids == TOKENS[20:28]
    assert drafted.token_ids == [5, 5]


def test_a_copy_is_cut_to_what_the_round_has_room_for():
    drafter, _ = make()
    wide = row("a", TOKENS, TOKENS[:40])
    drafter.plan_copies([wide], {"a": sum(GAINS[:2])})
    assert run_in_process(drafter.propose([ProposeRow(wide.request, 3)])) == [chain(TOKENS[40:43])]


def test_a_model_that_is_always_wrong_is_replaced_by_shorter_matches():
    drafter, model = make()
    short = [1, 2, 3, 4, 1, 2]
    assert propose(drafter, [row("before", short)])[0] == {}
    drafter.release("before")
    assert model.released == ["before"]
    assert propose(drafter, [row("after", short)], gains=[0.01, 0.0])[0] == {"after": 1}


def test_prompts_are_read_before_their_first_draft():
    drafter, _ = make()
    prompt = row("a", TOKENS, count=0)
    run_in_process(drafter.propose([prompt]))
    assert drafter._copier._texts["a"][1].length == len(TOKENS)


def test_the_engine_copies_at_full_length_while_no_chain_pays_and_learns_nothing_about_chains_from_it():
    engine = make_engine(
        cycle_model(40),
        lambda _: CombinedDrafter(ConstantDrafter(0), SuffixDrafter()),
        num_speculative_tokens=16,
        speculation="adaptive",
        clock=itertools.count(0.0, 0.001).__next__,  # every round takes as long
    )
    survival, learned = engine.planner.survival, []
    chances, observe = survival.chances, survival.observe

    def is_copy(history):
        return any(copies and history is other for (_, copies), other in survival._recent.items())

    def record(history, draft, path):
        learned.append(is_copy(history))
        observe(history, draft, path)

    def chances_of_copies(histories, length):
        return chances(histories, length) * np.array([is_copy(history) for history in histories]).reshape(-1, 1)

    survival.chances = chances_of_copies
    survival.observe = record
    prompt = [*range(40), *range(40)]
    tokens = run(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))])["0"]
    assert tokens == [*range(40), *range(40)]
    assert engine.stats.num_accepted_tokens_per_pos[15] >= 3
    assert set(learned) == {True}
    rounds = engine.stats.num_rounds_by_length
    assert sum(count for (length, _), count in rounds.items() if length) >= 5, "rounds of copies have drafts"


@pytest.mark.parametrize("model", [TARGET, UNLIKE])
@pytest.mark.parametrize("speculation", ["fixed", "adaptive"])
def test_the_text_does_not_depend_on_the_source(model, speculation):
    params = [SamplingParams(temperature=t, seed=1, max_tokens=60, ignore_eos=True) for t in (0.0, 0.7, 1.0)]
    requests = [([i % 5, i % 3, 1], params[i % 3]) for i in range(24)]
    expected = {str(i): expected_tokens(TARGET, *request) for i, request in enumerate(requests)}
    engine = make_engine(
        TARGET,
        lambda config: CombinedDrafter(ModelDrafter(DraftModel(model), config), SuffixDrafter()),
        num_speculative_tokens=8,
        max_num_seqs=8,
        num_blocks=40,
        speculation=speculation,
    )
    assert run(engine, requests) == expected
    assert engine.stats.num_accepted_tokens > 0
