"""Which states a request starts from, folds, saves and shares; the slots are simulated, so no model is needed.

`tests/engine/test_engine.py` runs the same checks over random histories.
"""

from dataclasses import replace

import pytest

from engine.config import EngineConfig, ModelInfo
from engine.control.plan import Plan
from engine.hybrids.state_slots import StateSlots
from engine.params import SamplingParams
from engine.protocols import Request, Verdict, chain
from engine.requests.sequence import Sequence
from engine.scheduler import Scheduler
from tests.engine.hybrids.memory import StateMemory

BLOCK, CHUNK, BOUNDARY = 4, 8, 8
INFO = ModelInfo("tiny", 1000, 1000, [], 0, "float32", "cpu")
TOKEN = 7
LONG = list(range(100, 140))


class Target:
    """A scheduler and a target that commits `TOKEN`s, whose rows are all checked."""

    def __init__(self, *, num_blocks=200, chunk=CHUNK, **settings):
        defaults = {"block_size": BLOCK, "max_num_batched_tokens": 64, "num_states": 12, "num_speculative_tokens": 3}
        config = EngineConfig(**(defaults | settings))
        self.states = StateSlots(config, replace(INFO, state_chunk=chunk))
        self.scheduler = Scheduler(config, num_blocks, 1000, self.states)
        self.memory = StateMemory(self.scheduler)

    def add(self, name, prompt, *, output=(), salt=b"", **params):
        params = SamplingParams(**({"max_tokens": 100} | params))
        sequence = Sequence(Request(name, list(prompt), len(prompt), params, salt), frozenset(), None)
        sequence.resume(list(output))
        self.scheduler.add(sequence)
        return sequence

    def compute(self, k=0, accepted=0, copies=()):
        """Compute a round, and return its rows and verdicts; nothing is committed."""
        self.memory.check_cached()
        batch = self.scheduler.next_batch(Plan(k, copies=dict(copies)))
        rows = [row.verify(chain([TOKEN] * row.num_draft_tokens)) for row in batch]
        self.memory.check(rows)
        verdicts = []
        for row in rows:
            path = list(range(min(accepted, len(row.draft.token_ids))))
            verdicts.append(Verdict([TOKEN] * (len(path) + 1), path, draft=row.draft) if row.reaches_tip else Verdict())
        self.memory.write(rows, verdicts)
        return batch, verdicts

    def round(self, k=0, **options):
        """Run a round, and return which tokens each of its rows computes."""
        batch, verdicts = self.compute(k, **options)
        self.scheduler.commit(batch, verdicts)
        self.memory.check_owned(self.scheduler)
        pool, blocks = self.scheduler.pool, [set(s.block_ids) for s in self.scheduler.running]
        assert pool.num_free == pool.num_blocks - len(set().union(*blocks))
        self.memory.check_cached()
        return [(row.request.request_id, row.start, row.start + row.length) for row in batch]

    def finish(self, name, prompt, **settings):
        """Run a request to its end by itself; return its text."""
        sequence = self.add(name, prompt, **settings)
        while sequence.finish_reason is None:
            self.round()
        return sequence.request.token_ids

    def cached(self):
        """How many tokens each cached state stands for."""
        return sorted(len(self.memory.slots[slot][1]) for slot in self.states._block_of.values())


def ends(target, name):
    """Where the rows of a request end until its prompt is computed, the round after included."""
    found = []
    while not found or found[-1] <= len(LONG):
        found += [end for row, _, end in target.round() if row == name]
    return found


# Rows.


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(1, [8, 16, 24, 32, 40, 41]), (7, [8, 16, 24, 32, 40, 41]), (20, [16, 32, 40, 41]), (39, [32, 40, 41])],
)
def test_rows_inside_a_prompt_end_where_chunks_end_whatever_the_budget(budget, expected):
    target = Target(max_num_batched_tokens=budget)
    target.add("a", LONG)
    assert ends(target, "a") == expected


def test_a_chunk_may_exceed_what_other_rows_leave_of_the_budget():
    target = Target(max_num_batched_tokens=10)
    for name in "abcd":
        target.add(name, [1])
        target.round()
    target.add("e", LONG[:11])
    target.add("f", LONG)
    assert target.round(k=1)[4:] == [("e", 0, 8)]  # four tokens more than four rows of one draft token leave


def test_generated_tokens_of_a_resumed_request_are_cut_anywhere():
    target = Target(max_num_batched_tokens=11)
    target.add("a", LONG[:12], output=[TOKEN] * 20)
    assert [target.round() for _ in range(3)] == [[("a", 0, 8)], [("a", 8, 19)], [("a", 19, 30)]]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, CHUNK - 1, CHUNK, CHUNK + 1])
def test_short_prompts_alone_and_many_at_once(length):
    """A prompt of as many tokens as a verification has must not be taken for one (vllm#53051)."""
    target = Target(max_num_batched_tokens=64)
    for name in "abcd":
        target.add(name, LONG[:length], max_tokens=30)
    while target.scheduler.running or target.scheduler.waiting:
        target.round(3, accepted=2)


def test_rounds_with_and_without_drafts_fold_what_was_accepted():
    """An accepting round, then one without drafts, then one beside a prompt's chunk (vllm#39273, #55504)."""
    target = Target()
    sequence = target.add("a", LONG[:9])
    folded = []
    for k, accepted in ((0, 0), (3, 2), (0, 0), (3, 3), (2, 0), (1, 1)):
        target.add(f"prompt {len(folded)}", [len(folded)] * 9)
        batch, verdicts = target.compute(k, accepted=accepted)
        folded.append(next(row.slot.num_folded for row in batch if row.request is sequence.request))
        target.scheduler.commit(batch, verdicts)
    assert folded == [0, 0, 2, 0, 3, 0]


def test_a_boundary_inside_an_accepted_draft_is_saved_in_the_next_round():
    target = Target()
    target.add("a", LONG[:9])
    starts = [target.round(3, accepted=3)[0][1] for _ in range(4)]
    assert starts == [0, 9, 13, 17]
    assert 16 in target.cached()


def test_no_draft_is_longer_than_the_updates_that_a_slot_holds():
    target = Target(max_num_seqs=8)
    target.add("a", [1])
    target.round()
    batch, _ = target.compute(3, copies={"a": 9})
    assert [row.num_draft_tokens for row in batch] == [3]


# What is shared.


def test_the_first_repeat_of_a_prompt_starts_from_its_last_boundary():
    """Not every prompt ends behind a boundary: one token is left to compute (vllm#54360, #45238)."""
    for length, place in ((CHUNK, 0), (CHUNK + 1, 8), (16, 8), (17, 16), (40, 32)):
        target = Target()
        target.finish("a", LONG[:length], max_tokens=1)
        again = target.add("b", LONG[:length])
        assert target.round() == [("b", place, length)]
        assert (again.num_cached, target.scheduler.stats.num_prefix_hits) == (place, place)
        assert target.memory.num_hits == bool(place)


def test_blocks_behind_the_state_are_computed_again_in_other_blocks():
    target = Target()
    first = target.add("a", LONG[:16])
    target.round()
    again = target.add("b", LONG[:16])
    target.round()
    assert again.block_ids[:2] == first.block_ids[:2]
    assert not set(again.block_ids[2:]) & set(first.block_ids)


def test_two_requests_start_from_one_state_and_go_different_ways():
    target = Target(num_states=6)
    target.finish("a", LONG[:17], max_tokens=1)
    for name in "bc":
        target.add(name, [*LONG[:16], ord(name)], max_tokens=12)
    assert target.round() == [("b", 16, 17), ("c", 16, 17)]
    while target.scheduler.running:
        target.round(3, accepted=1)
    assert target.finish("d", LONG[:17], max_tokens=1) == [*LONG[:17], TOKEN]
    assert target.memory.num_hits == 3


def test_the_newest_state_of_an_output_replaces_the_one_before():
    target = Target()
    text = target.finish("a", LONG[:9], max_tokens=20)
    assert target.cached() == [8, 24]
    target.add("b", [*text, 1, 2])
    assert target.round() == [("b", 24, 31)]


def test_a_request_that_leaves_a_cached_prefix_saves_the_state_there():
    target = Target()
    target.finish("a", LONG, max_tokens=1)
    target.add("b", [*LONG[:21], *[1] * 20], max_tokens=1)
    target.round()
    assert target.cached() == [16, 32, 40, 40]
    target.add("c", [*LONG[:21], *[2] * 20])
    assert target.round() == [("c", 16, 41)]


def test_salts_share_no_states():
    target = Target()
    target.finish("a", LONG, max_tokens=1, salt=b"a")
    target.add("b", LONG, salt=b"b")
    assert target.round() == [("b", 0, 40)]


def test_a_prompt_whose_log_probabilities_are_wanted_starts_from_nothing():
    target = Target()
    target.finish("a", LONG, max_tokens=1)
    target.add("b", LONG, prompt_logprobs=0)
    assert target.round() == [("b", 0, 40)]


def test_without_prefix_caching_nothing_is_saved():
    target = Target(enable_prefix_caching=False)
    target.add("a", LONG)
    batch, _ = target.compute()
    assert batch[0].slot.saves == ()


# Slots.


def test_a_state_is_not_found_before_its_round_is_committed():
    """Nor if the request is aborted in each of its rounds, and retried (vllm#56525)."""
    target = Target(max_num_batched_tokens=16)
    for num_committed, cached in ((0, []), (1, []), (2, [16, 32]), (0, [16, 32])):
        target.add("a", LONG)
        for _ in range(num_committed):
            target.round()
        batch, verdicts = target.compute()
        target.scheduler.abort("a")
        target.scheduler.commit(batch, verdicts)
        assert target.cached() == cached
        assert target.states.num_free == 12


def test_a_cached_state_is_kept_until_the_row_that_reads_it_is_committed():
    target = Target(num_states=3)
    target.finish("a", LONG[:9], max_tokens=1)
    target.add("b", LONG[:9])
    target.add("c", [1] * 9)
    assert target.round() == [("b", 8, 9), ("c", 0, 9)]
    assert target.cached() == [8]  # there was no slot for a state of c


@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_few_slots_delay_requests_but_none_waits_for_ever(num_states):
    """The last free slot may be the cached state itself: then it is given up."""
    target = Target(num_states=num_states)
    target.finish("a", LONG, max_tokens=20)
    for name in "bcd":
        target.add(name, LONG, max_tokens=20)
    for _ in range(80):
        target.round(2, accepted=1)
    assert not target.scheduler.running
    assert not target.scheduler.waiting


def test_a_preempted_request_starts_again_from_its_deepest_state():
    target = Target(num_blocks=1 + 10)
    old, young = target.add("old", LONG[:14]), target.add("young", [1] * 14)
    while not target.scheduler.stats.num_preemptions:
        target.round(1, accepted=1)
    target.scheduler.abort("old")
    assert old.finish_reason is None
    ((_, start, end),) = target.round()
    assert (start % BOUNDARY, start > 0, end) == (0, True, len(young.request.token_ids) - 1)


def test_a_lost_memory_has_no_states():
    target = Target()
    target.add("a", LONG)
    target.round()
    target.memory.lose()
    target.scheduler.reset()
    assert target.states.num_free == 12
    assert target.round() == [("a", 0, 41)]


def test_after_a_lost_round_a_request_starts_from_a_state_that_the_round_cannot_have_changed():
    target = Target()
    for name in "ab":
        target.add(name, [*LONG[:20], ord(name)])
    target.round()
    target.scheduler.withdraw(target.compute(3, accepted=2)[0])
    assert [row for row, *_ in target.round()] == ["a", "b"]
    target.round()
