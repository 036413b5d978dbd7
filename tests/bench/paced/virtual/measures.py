"""What is measured in the twin: the gain of a hidden draft, what the controls are worth, and the draft pool."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from tests.bench.paced.group import Finish, Models, Stretch, config_of, decode
from tests.bench.paced.roofline import Pair
from tests.bench.paced.virtual.twin import Place, Twin
from tests.bench.paced.virtual.wire import Costs
from tests.bench.paced_device import Accelerator
from tests.bench.workload import Arm

_STAGGER_S = 0.0037
"""Between the starts of two groups, so that their rounds have different phases."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all twins of a measurement have in common.

    Attributes:
        num_warm: tokens of each request before the time is taken: the drafter and the planner learn meanwhile.
        num_tokens: tokens of each request that are timed, on average.
    """

    models: Models
    prompts: Sequence[Sequence[int]]
    costs: Costs = field(default_factory=Costs)
    k: int = 4
    num_warm: int = 64
    num_tokens: int = 64

    @property
    def context(self) -> float:
        """The mean context of a row while it is timed."""
        return mean(map(len, self.prompts)) + self.num_warm + self.num_tokens / 2


@dataclass(frozen=True, slots=True)
class Timed:
    """One arm in the twin; `rows` are the requests of each group."""

    pair: str
    arm: str
    num_groups: int
    rows: int
    tokens_per_s: float
    num_gpus: int

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_s / self.num_gpus


def time_arm(
    bench: Bench,
    pair: str,
    name: str,
    rows: int,
    temperatures: Sequence[float],
    *,
    seed: int = 0,
    place: Place = "own",
    num_groups: int = 1,
    drafting: str = "model",
    make_gpu: Callable[[], Accelerator] = Accelerator,
) -> tuple[Timed, list[Stretch]]:
    """Time one arm; the temperatures and the prompts are given to the rows in turn."""
    arm = Arm.of(name, bench.k)
    longest = max(map(len, bench.prompts)) + bench.num_warm + 4 * bench.num_tokens
    config = config_of(arm, rows, longest, drafting)
    heats = list(itertools.islice(itertools.cycle(temperatures), rows))

    async def time_group(number: int) -> Stretch:
        await asyncio.sleep(number * _STAGGER_S)
        start = (seed + number) * rows
        prompts = [bench.prompts[(start + index) % len(bench.prompts)] for index in range(rows)]
        return await decode(
            twin.groups[number].engine,
            prompts,
            heats,
            num_warm=bench.num_warm,
            num_tokens=bench.num_tokens,
            clock=twin.loop.time,
            seed=1000 * seed + start,
            finish=finish,
        )

    async def time_all() -> list[Stretch]:
        return await asyncio.gather(*map(time_group, range(num_groups)))

    finish = Finish(num_groups)
    where: Any = {"place": place, "num_groups": num_groups, "make_gpu": make_gpu}
    with Twin(bench.models, Pair.of(pair), arm, config, bench.costs, **where) as twin:
        stretches = twin.run(time_all())
    timed = Timed(
        pair,
        name,
        num_groups,
        rows,
        tokens_per_s=sum(stretch.tokens_per_s for stretch in stretches),
        num_gpus=twin.num_gpus if arm.k else num_groups * Pair.of(pair).target.num_gpus,
    )
    return timed, stretches


@dataclass(frozen=True, slots=True)
class Hidden:
    """How much of the draft an arm hides.

    Attributes:
        gain: tokens/s over those of drafts in turn.
        bound: `1 + k * t_draft / t_verify` by the roofline: what it would be if drafts took no time, and rounds nothing
            but passes.
        share_of_bound: of that gain.
    """

    timed: Timed
    gain: float
    bound: float
    share_of_bound: float


HIDDEN_ARMS = ("run-ahead", "alternate", "any", "adaptive-any")


def hidden(bench: Bench, pairs: Sequence[str], sizes: Sequence[int], temperature: float) -> Iterator[Hidden]:
    """Compare what overlaps a verification with drafts in turn, which are the first arm.

    Raises RuntimeError if a text is not that of drafts in turn.
    """
    for pair, rows in itertools.product(pairs, sizes):
        bound = Pair.of(pair).bound(rows, bench.k, bench.context)
        base, texts = time_arm(bench, pair, "speculative", rows, [temperature])
        yield Hidden(base, 1.0, bound, 0.0)
        for arm in HIDDEN_ARMS:
            timed, stretches = time_arm(bench, pair, arm, rows, [temperature])
            check_texts(texts, stretches)
            gain = timed.tokens_per_s / base.tokens_per_s
            yield Hidden(timed, gain, bound, (gain - 1) / (bound - 1))


def check_texts(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> None:
    """Raise RuntimeError if two arms' texts differ, as far as both wrote them."""
    for stretch, other in zip(stretches, others, strict=True):
        for name, text in stretch.texts.items():
            length = min(len(text), len(other.texts[name]))
            if text[:length] != other.texts[name][:length]:
                raise RuntimeError(f"request {name} has another text")


@dataclass(frozen=True, slots=True)
class Lead:
    """The tokens/s of one arm over those of the best of several others, by seed."""

    pair: str
    rows: int
    best: str
    ratios: list[float]

    @property
    def mean(self) -> float:
        return mean(self.ratios)


def lead(
    bench: Bench,
    pair: str,
    rows: int,
    temperatures: Sequence[float],
    arm: str,
    others: Sequence[str],
    seeds: Sequence[int],
    drafting: str = "model",
) -> Lead:
    """Compare an arm with the arm that is best over all seeds."""
    speeds = {
        (name, seed): time_arm(bench, pair, name, rows, temperatures, seed=seed, drafting=drafting)[0].tokens_per_s
        for seed in seeds
        for name in (arm, *others)
    }
    best = max(others, key=lambda name: mean(speeds[name, seed] for seed in seeds))
    return Lead(pair, rows, best, [speeds[arm, seed] / speeds[best, seed] for seed in seeds])


def pools(
    bench: Bench, pair: str, rows: int, temperature: float, counts: Sequence[int]
) -> Iterator[tuple[Timed, Timed, Timed]]:
    """Time so many groups on one draft GPU; the same with a draft GPU each; and with drafts beside the targets, by the
    fastest way that is known for them."""
    for count in counts:
        pooled, own = (
            time_arm(bench, pair, "run-ahead", rows, [temperature], place=place, num_groups=count)[0]
            for place in ("pool", "own")
        )
        # Drafts beside the target share nothing between groups.
        beside = max(
            (
                time_arm(bench, pair, name, rows, [temperature], place="beside", num_groups=count)[0]
                for name in ("plain", "fixed-2", "speculative")
            ),
            key=lambda timed: timed.per_gpu,
        )
        yield pooled, own, beside
