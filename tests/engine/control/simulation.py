"""Rounds in virtual time: a planner over rooflines, requests with acceptance of their own, noise and drift."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.control.plan import RoundSeconds
from engine.control.planner import Planner
from engine.params import SamplingParams
from engine.protocols import NoDrafter, Request, ScheduledRow, Verdict, chain
from tests.bench.paced.roofline import Pair, Work

LARGE, SMALL = Pair.of("h100x4-70b+h100-1b"), Pair.of("h100-8b+h100-1b")
CONTEXT = 600
OVERHEAD_S = 5e-4


@dataclass
class Row:
    """A request that never ends.

    Attributes:
        rate: the mean probability that a draft token is accepted after accepted ones.
        is_copy: its drafts are copies, which take no pass of the draft.
    """

    rate: float
    params: SamplingParams = field(default_factory=SamplingParams)
    is_copy: bool = False


class Copier(NoDrafter):
    """Plans a copy of full length for each row that copies."""

    def __init__(self, simulation, length):
        self.simulation, self.length = simulation, length

    def plan_copies(self, rows, expected):
        names = [row.request.request_id for row in rows]
        return {name: self.length for name in names if self.simulation.rows[name][0].is_copy}


class Simulation:
    """Attributes: `tokens`, `seconds` since the last `reset`; `lengths` drafted by row name; `modes` by round."""

    def __init__(
        self, pair, rows, *, k=8, seed=1, noise=0.1, drift=False, overlaps=(), speculation="adaptive", hits=0.9, **own
    ):
        config = EngineConfig(num_speculative_tokens=k, speculation=speculation, max_num_seqs=1024)
        self.planner = Planner(config, 0, Copier(self, k), overlaps)
        self.pair, self.k, self.chance, self.noise, self.drift, self.hits = (
            pair,
            k,
            random.Random(seed),
            noise,
            drift,
            hits,
        )
        self.rows = {}
        for i, row in enumerate(rows):
            self.add(f"r{i}", row)
        self.num_rounds = 0
        self.turn = 0
        self.reset()

    def add(self, name, row):
        self.rows[name] = row, Request(name, [1, 2], 2, row.params)

    def replace(self, rows):
        """Serve these rows by name, and no others; those of a known name go on."""
        known, self.rows = self.rows, {}
        for name, row in rows.items():
            self.add(name, row)
            if name in known:
                self.rows[name] = known[name]

    def resize(self, num_rows, row):
        self.replace({f"r{i}": row for i in range(num_rows)})

    def reset(self):
        self.tokens = self.seconds = 0.0
        self.lengths, self.modes, self.reasons = Counter(), Counter(), Counter()
        self.by_row = Counter()
        self.plan_s = []

    def verify_s(self, num_rows, num_tokens):
        return self.pair.target.pass_seconds(Work(num_tokens, num_tokens, num_rows * CONTEXT, num_tokens * CONTEXT))

    def draft_s(self, num_rows, depth):
        return self.pair.draft_s(num_rows, depth, CONTEXT)

    def run(self, num_rounds):
        for _ in range(num_rounds):
            self.step()
        return self.tokens / self.seconds

    def step(self):
        planner, chance = self.planner, self.chance
        self.num_rounds += 1
        num_cohorts = planner.choose_cohorts(len(self.rows))
        names = list(self.rows)
        if num_cohorts == 2:
            self.turn = 1 - self.turn
            names = names[self.turn :: 2]
        requests = [self.rows[name][1] for name in names]
        plan = planner.plan(requests, has_prompts=False)
        overlap = plan.overlap
        batch = [ScheduledRow(request, plan.length_of(request), 1, 1, []) for request in requests]
        drafts = [chain([7] * row.num_draft_tokens) for row in batch]
        drafted = [
            row.num_draft_tokens for name, row in zip(names, batch, strict=True) if not self.rows[name][0].is_copy
        ]
        depth = max(drafted, default=0)
        num_tokens = len(batch) + sum(len(draft.token_ids) for draft in drafts)
        verdicts = []
        for name, draft in zip(names, drafts, strict=True):
            length, rate = len(draft.token_ids), self.rows[name][0].rate
            accepted = next((i for i in range(length) if chance.random() > rate), length)
            verdicts.append(Verdict([5] * (accepted + 1), list(range(accepted)), draft=draft))
            expected = sum(rate**i for i in range(length + 1))
            self.tokens += expected
            self.by_row[name] += expected
            self.lengths[name] += length
        slow = 1.5 if self.drift and self.num_rounds // 400 % 2 else 1.0
        slow *= math.exp(chance.gauss(0, self.noise))
        verify_s = self.verify_s(len(batch), num_tokens)
        draft_s = self.draft_s(len(batch), depth) + 2e-4 if depth else 0.0
        if overlap == "ahead" and chance.random() < self.hits ** len(batch):
            draft_s = 2e-4 if depth else 0.0
        total_s = max(draft_s, verify_s) if overlap == "alternate" else draft_s + verify_s
        total_s += OVERHEAD_S
        planner.observe(plan, batch, verdicts, RoundSeconds(total_s * slow, draft_s * slow, verify_s * slow))
        self.seconds += total_s
        self.modes[overlap] += 1
        self.reasons[plan.reason, plan.num_draft_tokens] += 1


def uniform_rate(pair, num_rows, rate, k):
    """Tokens per second with drafts of one length in every round, in expectation; k = 0 is off."""
    simulation = Simulation(pair, [])
    draft_s = simulation.draft_s(num_rows, k) + 2e-4 if k else 0.0
    round_s = simulation.verify_s(num_rows, num_rows * (1 + k)) + draft_s + OVERHEAD_S
    return num_rows * sum(rate**i for i in range(k + 1)) / round_s
