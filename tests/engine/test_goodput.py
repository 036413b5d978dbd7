"""The control of the draft length: its choices over a model of costs, and the engine's text, which must not notice."""

import itertools
import random
from collections import Counter

import pytest

from engine.drafters.model import ModelDrafter
from engine.drafters.run_ahead import RunAheadDrafter
from engine.goodput import Goodput
from engine.sampling import SamplingParams
from tests.engine.laws import p_value
from tests.engine.running import make_engine, run
from tests.engine.test_exactness import TARGET, UNLIKE, joint_law
from tests.fakes import InterruptedDrafter

MAX_K = 4
MEMORY_BOUND = {"draft": 0.2, "row": 0.02, "fixed": 1.0}
CHEAP_DRAFT = {"draft": 0.05, "row": 0.001, "fixed": 1.0}
COMPUTE_BOUND = {"draft": 0.3, "row": 0.3, "fixed": 1.0}


class Machine:
    """Rounds whose times follow a formula, on a machine that others use too.

    Single rounds take -20 % to +60 % of that, and all of them take 1.4 times as long for some hundred rounds now and then.
    """

    def __init__(self, *, draft, row, fixed, acceptance, seed=1, most=MAX_K):
        self.draft, self.row, self.fixed, self.acceptance = draft, row, fixed, acceptance
        self.random = random.Random(seed)
        self.most = most
        self.lengths = Counter()
        self.num_rounds = 0

    def round_s(self, batch_size, k):
        return k * self.draft + self.fixed + self.row * batch_size * (1 + k)

    def run(self, control, batch_size, num_rounds, *, is_measured=lambda _: True, limit=None):
        """Return the tokens per second that these rounds made, noise apart."""
        tokens = elapsed = 0.0
        limits = [self.most if limit is None else limit] * batch_size
        for _ in range(num_rounds):
            self.num_rounds += 1
            measured = is_measured(self.num_rounds)
            k = control.choose(limits, is_measured=measured)
            self.lengths[k] += 1
            for _ in range(batch_size):
                accepted = next((i for i in range(k) if self.random.random() > self.acceptance), k)
                control.observe_draft(k, accepted)
                tokens += 1 + accepted
            elapsed += self.round_s(batch_size, k)
            if measured:
                neighbour = 1.4 if self.num_rounds // 150 % 2 else 1.0
                noise = self.random.uniform(0.8, 1.6) * neighbour
                control.observe(limits, self.round_s(batch_size, k) * noise)
        return tokens / elapsed


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("costs", [MEMORY_BOUND, CHEAP_DRAFT, COMPUTE_BOUND], ids=["memory", "cheap draft", "compute"])
def test_adaptive_is_never_much_below_the_better_of_off_and_fixed(batch_size, acceptance, costs):
    rates = {
        mode: Machine(**costs, acceptance=acceptance).run(Goodput(MAX_K, mode), batch_size, 3000)
        for mode in ("adaptive", "fixed", "off")
    }
    assert rates["adaptive"] >= 0.95 * max(rates["fixed"], rates["off"])
