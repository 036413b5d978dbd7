"""Plan: which draft, draft length, pool and number of replicas pay, by measured acceptance, a roofline and prices.

Each arm takes the draft length that gives it the most tokens per second. A group is one target; its share of a pool is
`1 / N` of a draft GPU, where N groups are served by one. A pool answers the messages that wait at the same time in one
pass, so a draft takes longer the more of its time a pool is busy: `together` is how many groups share a pass.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps, loads
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.errors import ConfigError
from engine.protocols import Overlap
from tests.bench.paced.roofline import CONTEXT, HARDWARE, HIT_RATE, PacedDevice, Pair

PRICES: Mapping[str, float] = {"b200": 5.5, "h200": 3.8, "h100": 3.0, "a100": 1.8, "l40s": 1.0, "l4": 0.7}
"""US dollars for a GPU and an hour. Examples: prices are yours to give."""
BATCH_SIZES, POOLS = (1, 8, 32, 64, 256), (1, 2, 4, 8)
"""Requests of a group, and groups of one draft GPU."""
MAX_LENGTH = 8
"""The longest draft that is considered where acceptance is one rate."""
OVERLAPS: Mapping[Overlap, str] = {"none": "in turn", "ahead": "ahead", "alternate": "alternating"}


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm at one batch size, with the best draft length.

    Attributes:
        arm, draft: how drafts are made, and the device that makes them; none for plain decoding.
        num_groups: groups that share one draft GPU; 0 if the draft has none.
        batch_size: requests of a group.
        k: draft tokens of a request in a round.
        tokens_per_s: of a group.
        gpus, dollars_per_hour: of a group and its share of a pool.
        replicas: groups that the wanted tokens per second take; None if none were named.
    """

    arm: str
    draft: str
    num_groups: int
    batch_size: int
    k: int
    tokens_per_s: float
    gpus: float
    dollars_per_hour: float
    replicas: int | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second over the GPUs, whatever these cost."""
        return self.tokens_per_s / self.gpus

    @property
    def dollars_per_million(self) -> float:
        """US dollars for a million tokens of groups that are busy all the time."""
        return self.dollars_per_hour / 3600 / self.tokens_per_s * 1e6


def pooled_round_s(pair: Pair, batch_size: int, k: int, overlap: Overlap, num_groups: int) -> tuple[float, float]:
    """Return the time of a round of one of `num_groups` groups with one draft GPU, and how many share its passes.

    As many share a pass as groups wait for drafts at the same time: `num_groups` times the share of a round in which
    one of them does.
    """
    together = 1.0
    for _ in range(100):
        round_s = pair.overlapped_s(batch_size, k, overlap, together=together)
        rows = (batch_size + 1) // 2 if overlap == "alternate" else batch_size
        times = 2 if overlap == "alternate" else 1
        busy_s = times * pair.draft_s(rows * together, k + (overlap == "ahead"))
        before, together = together, min(num_groups, max(1.0, num_groups * busy_s / round_s))
        if abs(together - before) < 1e-3:
            break
    return round_s, together


def choices(
    target: PacedDevice, drafts: Sequence[PacedDevice], accepted: Sequence[float], prices: Mapping[str, float],
    batch_sizes: Iterable[int], pools: Sequence[int], wanted_per_s: float | None = None,
) -> Iterator[Choice]:  # fmt: skip
    """Yield every arm at every batch size.

    Args:
        accepted: the share of drafts whose first i tokens were all accepted, for i = 1 to the longest draft.
        pools: numbers of groups that one draft GPU may serve.
        wanted_per_s: tokens per second of all replicas.
    """
    lengths = range(1, len(accepted) + 1)
    own = target.num_gpus * prices[_gpu(target)]

    def best(arm: str, draft: str, size: int, num_groups: int, rounds: Mapping[int, float], extra: float) -> Choice:
        speeds = {k: size * (1 + sum(accepted[:k])) / round_s for k, round_s in rounds.items()}
        k = max(speeds, key=lambda k: speeds[k])
        gpus = target.num_gpus + (1 / num_groups if num_groups else 0)
        needed = None if wanted_per_s is None else math.ceil(wanted_per_s / speeds[k])
        return Choice(arm, draft, num_groups, size, k, speeds[k], gpus, own + extra, needed)

    for size in batch_sizes:
        yield best("no draft", "", size, 0, {0: Pair(target, target).target_s(size, 0)}, 0.0)
        for draft in {draft.model: replace(draft, hardware=target.hardware) for draft in drafts}.values():
            beside, name = Pair(target, draft), f"{_gpu(target)}-{draft.name.split('-')[1]}"
            yield best("beside the target", name, size, 0, {k: beside.overlapped_s(size, k) for k in lengths}, 0.0)
        for draft in drafts:
            pair, price = Pair(target, draft), prices[_gpu(draft)]
            overlaps = [overlap for overlap in OVERLAPS if overlap != "alternate" or size > 1]
            for overlap in overlaps:
                rounds = {k: pair.overlapped_s(size, k, overlap) for k in lengths}
                yield best(f"own draft {OVERLAPS[overlap]}", draft.name, size, 1, rounds, price)
            for num_groups in pools:
                rounds = {
                    k: min(pooled_round_s(pair, size, k, overlap, num_groups)[0] for overlap in overlaps)
                    for k in lengths
                }
                yield best(f"pool of {num_groups} : 1", draft.name, size, num_groups, rounds, price / num_groups)


def accepted_of(acceptance: str) -> list[float]:
    """Return the share of drafts whose first i tokens are accepted, from a rate, or from these shares.

    Raises ConfigError if it is neither, or a number is not between 0 and 1.
    """
    try:
        shares = [float(text) for text in acceptance.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares) or shares != sorted(shares, reverse=True):
        raise ConfigError(f"acceptance is {acceptance!r}; it must be a rate, or falling rates by position (0.8,0.6)")
    return [shares[0] ** i for i in range(1, MAX_LENGTH + 1)] if len(shares) == 1 else shares


def read_prices(path: Path | None) -> Mapping[str, float]:
    """Return US dollars for a GPU and an hour, by its name in lower case: the examples, and a file's in their place.

    Raises ConfigError if it is no JSON object of prices of known GPUs.
    """
    if path is None:
        return PRICES
    try:
        given = {str(name).lower(): float(price) for name, price in loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} holds no prices, such as {dumps({'h100': 3.0})}: {error}") from error
    if wrong := [name for name, price in given.items() if name not in HARDWARE or price <= 0]:
        raise ConfigError(f"{path}: {', '.join(wrong)}: a price above 0 of one of {', '.join(HARDWARE)} is needed")
    return {**PRICES, **given}


def show_plan(planned: Sequence[Choice], target: str, console: Console) -> None:
    """Print a table for each batch size, and what is best."""
    for size in dict.fromkeys(choice.batch_size for choice in planned):
        title = f"{target}, {size} requests of {CONTEXT} tokens a group; by datasheets and a roofline, not measured"
        table = Table("arm", "draft", title=title)
        for name in ("k", "tokens/s", "of no draft", "per GPU", "of no draft", "$/million", "replicas"):
            table.add_column(name, justify="right")
        here = [choice for choice in planned if choice.batch_size == size]
        plain = here[0]
        cheapest = min(here, key=lambda choice: choice.dollars_per_million)
        for choice in here:
            per_gpu = choice.tokens_per_s_per_gpu / plain.tokens_per_s_per_gpu
            cells = (
                f"{choice.k}", f"{choice.tokens_per_s:.0f}", f"{choice.tokens_per_s / plain.tokens_per_s:.2f}",
                f"{choice.tokens_per_s_per_gpu:.0f}", f"{per_gpu:.2f}",
                f"{choice.dollars_per_million:.2f}", "" if choice.replicas is None else str(choice.replicas),
            )  # fmt: skip
            table.add_row(choice.arm, choice.draft, *cells, style="bold" if choice is cheapest else None)
        console.print(table)
        per_gpu = max(here, key=lambda choice: choice.tokens_per_s_per_gpu)
        console.print(
            f"most tokens/s per GPU: {per_gpu.arm} {per_gpu.draft}; cheapest: {cheapest.arm} {cheapest.draft}"
        )
    console.print(f"a row hits {HIT_RATE:.0%} of prepared drafts; prices are yours to give (--prices)", highlight=False)


def _gpu(device: PacedDevice) -> str:
    return device.name.split("-")[0].split("x")[0]
