"""CombinedDrafter: which source drafts a row, and that the text does not depend on it."""

import itertools

import torch

from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, chain, run_in_process
from tests.engine.running import make_engine, run
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

    async def propose(self, rows):
        self.calls.append([row.num_draft_tokens for row in rows])
        return await super().propose(rows)


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


def test_the_engine_copies_at_full_length_while_no_chain_pays():
    engine = make_engine(
        cycle_model(40),
        lambda _: CombinedDrafter(ConstantDrafter(0), SuffixDrafter()),
        num_speculative_tokens=16,
        speculation="adaptive",
        clock=itertools.count(0.0, 0.001).__next__,  # every round takes as long
    )
    tokens = run(engine, [([*range(40)] * 2, SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True))])["0"]
    assert tokens == [*range(40)] * 4
    assert engine.stats.num_accepted_tokens_per_pos[15] >= 6
