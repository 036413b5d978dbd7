"""Which states a request starts from, folds, saves and shares; the slots are simulated, so no model is needed."""

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


# Slots.


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
