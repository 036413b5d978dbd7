"""The twin against schedules computed by hand, with passes of constant time: where a round waits, and for what."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.bench.paced.group import Finish, Models, config_of, decode
from tests.bench.paced.light_pair import make_light_pair
from tests.bench.paced.virtual.measures import check_texts
from tests.bench.paced.virtual.twin import Twin
from tests.bench.paced.virtual.wire import Costs
from tests.bench.workload import Arm

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16]]
K = 4
WIRE_S = 0.5e-3
FREE, WIRED = Costs(0.0, 0.0, 0.0, 0.0, 0.0), Costs(WIRE_S, 0.0, 0.0, 0.0, 0.0)


@dataclass
class Constant:
    """A device whose passes all take the same time."""

    seconds: float
    num_gpus: int = 1
    name: str = "constant"

    def pass_seconds(self, work):
        return self.seconds


def pair(target_s, draft_s=1e-3):
    return SimpleNamespace(target=Constant(target_s, 4), draft=Constant(draft_s))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models.load(*map(str, make_light_pair(tmp_path_factory.mktemp("pair"))))


def timed(models, devices, name, rows, *, costs=FREE, temperature=0.7, num_groups=1, **options):
    """Return the stretches of all groups, and the twin."""
    arm = Arm.of(name, K)
    config = config_of(arm, rows, 200)
    finish = Finish(num_groups)

    async def all_groups():
        works = [
            decode(
                group.engine,
                PROMPTS[:rows],
                [temperature] * rows,
                num_warm=8,
                num_tokens=24,
                clock=twin.loop.time,
                finish=finish,
            )
            for group in twin.groups
        ]
        return await asyncio.gather(*works)

    with Twin(models, devices, arm, config, costs, num_groups=num_groups, **options) as twin:
        return twin.run(all_groups()), twin


def test_a_draft_in_turn_adds_its_passes_and_two_more_messages(models):
    (stretch,), _ = timed(models, pair(10e-3), "speculative", 2, costs=WIRED)
    assert stretch.rounds_s == pytest.approx([10e-3 + K * 1e-3 + 4 * WIRE_S] * len(stretch.rounds_s))


@pytest.mark.parametrize("target_s", [10e-3, 4e-3, 3e-3, 0.5e-3])
def test_alternating_cohorts_take_the_cycle_that_the_design_says(models, target_s):
    draft_s = K * 1e-3
    (stretch,), twin = timed(models, pair(target_s), "alternate", 4)
    cycle_s = max(2 * target_s, 2 * draft_s, draft_s + target_s)
    pairs = [first + second for first, second in zip(stretch.rounds_s, stretch.rounds_s[1:], strict=False)]
    assert pairs == pytest.approx([cycle_s] * len(pairs))
    if target_s > draft_s:
        assert twin.groups[0].gpus.busy_s == pytest.approx(twin.loop.time(), rel=0.05), "the target is never idle"


def test_groups_of_a_pool_draft_in_the_same_passes_while_their_proposals_come_together(models):
    own, _ = timed(models, pair(10e-3), "speculative", 2)
    pooled, twin = timed(models, pair(10e-3), "speculative", 2, place="pool", num_groups=3)
    assert twin.num_gpus == 13
    for stretch in pooled:
        check_texts(own, [stretch])
        # A proposal that comes while another one is drafted waits for it.
        assert max(stretch.rounds_s) <= 10e-3 + 2 * K * 1e-3 + 1e-9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_arms_write_the_same_texts(models, temperature):
    (plain,), _ = timed(models, pair(5e-3), "plain", 4, temperature=temperature)
    assert min(map(len, plain.texts.values())) >= 24
    for name in ("speculative", "run-ahead", "alternate", "adaptive-any", "fixed-2-alternate"):
        stretches, _ = timed(models, pair(5e-3), name, 4, temperature=temperature)
        check_texts([plain], stretches)
    stretches[0].texts["1"][3] += 1
    with pytest.raises(RuntimeError, match="request 1 has another text"):
        check_texts([plain], stretches)
