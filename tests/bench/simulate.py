"""The simulation's tables: checked against this machine; a 70B on four H100 with a draft on a fifth; other drafts."""

import itertools
import time
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.config import Speculation
from tests.bench.figures import since
from tests.bench.simulation import PROMPT_TOKENS, Costs, Outcome, Plane, run_streams, simulate
from tests.bench.turns import order
from tests.bench.virtual_time import Place
from tests.bench.with_engine import EngineMethod
from tests.bench.workload import Workload

LLAMA = Costs(
    target=Plane(18.15, token_ms=0.128),
    draft=Plane(1.52, token_ms=0.01),
    network_ms=0.1,
    overhead_ms=0.0,
    acceptance=0.85,
    rank_exponent=1.0,
)
SOURCES = (
    "Inputs, times in ms. Target pass 18.15 + 0.128 per token: plain 54.7 tok/s (Kumar, Dao, May, 2603.03251), slope "
    "from nano-PEARL's plain 70B at batch 1 and 32 (44.3 and 1206 tok/s, 2 GPUs). Draft pass 1.52: six are a third of "
    "their speculative round; 0.01 per token and 0.1 for the network one way are assumed. Acceptance 0.85 fits their "
    "speculative rate. A token not drafted is beyond the F next candidates with probability 1/F, as in their example. "
    "Greedy. Published, mean of four tasks: plain 54.7, k = 6 161.8, running ahead with k = 7 255.8 tok/s."
)


class Setting(NamedTuple):
    """One line of the table."""

    name: str
    place: Place
    num_speculative_tokens: int
    speculation: Speculation


SETTINGS = (
    Setting("plain, 4 GPUs", "beside", 0, "off"),
    Setting("draft on the same 4", "beside", 6, "fixed"),
    Setting("draft on a fifth", "apart", 6, "fixed"),
    Setting("running ahead on a fifth", "ahead", 7, "fixed"),
    Setting("running ahead, adaptive", "ahead", 7, "adaptive"),
)
STREAMS = (1, 8, 32)
CALIBRATION = ((1, 0), (1, 4), (8, 0), (8, 4))
CHECKS = ((1, 2), (4, 0), (4, 2), (4, 4), (8, 2))
NUM_TOKENS = 96
NUM_REQUESTS = 6
"""Of each stream, in a row."""
NUM_TURNS = 4
DRAFT_COSTS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.4)
"""Draft passes, in target passes."""
DRAFT_LENGTH = 4
PLACES: tuple[Place, Place] = ("apart", "ahead")


def run(workload: Workload, console: Console) -> None:
    """Print what the simulation says of this machine beside what it does, and then the hardware's table."""
    console.print(check(workload))
    table = Table(
        title="SIMULATED: Llama-3.1-70B, 4 H100, Llama-3.2-1B as the draft", caption=SOURCES, caption_justify="left"
    )
    for column in ("setting", "streams", "tokens/s", "to plain", "length", "hit rate", "mean k"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    plain: dict[int, float] = {}
    for setting in SETTINGS:
        for num_streams in STREAMS:
            found = simulate(
                LLAMA,
                setting.place,
                num_streams=num_streams,
                num_speculative_tokens=setting.num_speculative_tokens,
                speculation=setting.speculation,
                num_requests=6 if num_streams == 1 else 2,
            )
            speed = found.tokens_per_s / plain.setdefault(num_streams, found.tokens_per_s)
            table.add_row(setting.name, str(num_streams), f"{found.tokens_per_s:.1f}", f"{speed:.2f}", *_rest(found))
        table.add_section()
    console.print(table)
    console.print(draft_sizes())


def draft_sizes() -> Table:
    """Return what running ahead gains with drafts that cost more or less, and what hiding them wholly would."""
    table = Table(
        title=f"SIMULATED: the same target with other drafts on a fifth GPU, k = {DRAFT_LENGTH}, 1 stream",
        caption="Acceptance as above, so that only the draft's time differs. Bound: 1 + k * t_draft / t_verify.",
        caption_justify="left",
    )
    for column in ("t_draft / t_target", "tokens/s", "running ahead", "gain", "bound", "share of its gain", "hit rate"):
        table.add_column(column, justify="right")
    verify_ms = LLAMA.target.pass_ms + (DRAFT_LENGTH + 1) * LLAMA.target.token_ms
    for cost in DRAFT_COSTS:
        costs = replace(LLAMA, draft=replace(LLAMA.draft, pass_ms=cost * LLAMA.target.pass_ms))
        apart, ahead = (
            simulate(
                costs, place, num_streams=1, num_speculative_tokens=DRAFT_LENGTH, speculation="fixed", num_requests=6
            )
            for place in PLACES
        )
        gain, bound = ahead.tokens_per_s / apart.tokens_per_s, 1 + DRAFT_LENGTH * costs.draft.pass_ms / verify_ms
        table.add_row(
            f"{cost:.2f}",
            f"{apart.tokens_per_s:.1f}",
            f"{ahead.tokens_per_s:.1f}",
            f"{gain:.2f}",
            f"{bound:.2f}",
            f"{(gain - 1) / (bound - 1):.0%}",
            f"{ahead.hit_rate:.2f}",
        )
    return table


def check(workload: Workload) -> Table:
    """Measure costs in process at some batch sizes and lengths, and predict others from them; all in turn."""
    cells = (*CALIBRATION, *CHECKS)
    methods = {k: EngineMethod(workload, k) for k in sorted({k for _, k in cells})}
    measured = {cell: Measured() for cell in cells}
    for rows, k in cells:
        _measure(methods[k], workload, rows, 0)  # warms up
    for turn in range(NUM_TURNS):
        for rows, k in order(cells, turn):
            measured[rows, k] += _measure(methods[k], workload, rows, turn)
    costs = _fit({cell: measured[cell] for cell in CALIBRATION})
    caption = (
        f"target pass {costs.target.pass_ms:.2f} ms + {costs.target.row_ms:.3f} per row + "
        f"{costs.target.token_ms:.3f} per token, draft pass {costs.draft.pass_ms:.2f} + {costs.draft.token_ms:.3f} per "
        f"row, {costs.overhead_ms:.2f} outside "
        f"both, acceptance {costs.acceptance:.3f}; "
        f"from (rows, k) = {', '.join(map(str, CALIBRATION))}"
    )
    table = Table(
        title="The simulation against this machine, T = 0, one process", caption=caption, caption_justify="left"
    )
    for column in ("rows", "k", "measured tokens/s", "simulated", "ratio"):
        table.add_column(column, justify="right")
    for rows, k in cells:
        simulated = simulate(
            costs,
            "beside",
            num_streams=rows,
            num_speculative_tokens=k,
            speculation="fixed" if k else "off",
            num_tokens=NUM_TOKENS,
            num_requests=NUM_REQUESTS,
        ).tokens_per_s
        real = measured[rows, k].tokens_per_s
        table.add_row(str(rows), str(k), f"{real:.0f}", f"{simulated:.0f}", f"{simulated / real:.2f}")
    return table


@dataclass(frozen=True, slots=True)
class Measured:
    """What some rounds of one cell took, in seconds, and what they made."""

    elapsed_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    num_rounds: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def target_ms(self) -> float:
        """One pass of the target."""
        return self.target_s / self.num_rounds * 1e3

    @property
    def draft_ms(self) -> float:
        """One pass of the draft."""
        return self.draft_s / self.num_rounds * 1e3 * self.num_drafts / self.num_draft_tokens

    @property
    def overhead_ms(self) -> float:
        """What a round spends outside both."""
        return (self.elapsed_s - self.target_s - self.draft_s) / self.num_rounds * 1e3

    @property
    def acceptance(self) -> float:
        """The acceptance rate that, the same at every position, accepts as many."""
        return _acceptance(self.num_accepted_tokens / self.num_drafts, round(self.num_draft_tokens / self.num_drafts))


def _measure(method: EngineMethod, workload: Workload, rows: int, turn: int) -> Measured:
    endless = itertools.cycle(workload.prompts)
    prompts = itertools.islice(endless, turn * NUM_REQUESTS, None)
    streams = [[next(prompts)[:PROMPT_TOKENS] for _ in range(NUM_REQUESTS)] for _ in range(rows)]
    before = replace(method.engine.stats)
    drafter_s, verifier_s, started = method.drafter.seconds, method.verifier.seconds, time.perf_counter()
    run_streams(method.engine, streams, NUM_TOKENS)
    elapsed_s, made = time.perf_counter() - started, since(before, method.engine.stats)
    return Measured(
        elapsed_s,
        method.verifier.seconds - verifier_s,
        method.drafter.seconds - drafter_s,
        made.num_rounds,
        made.num_generation_tokens,
        made.num_drafts,
        made.num_draft_tokens,
        made.num_accepted_tokens,
    )


def _acceptance(num_accepted: float, k: int) -> float:
    """Return the rate that, the same at every position, accepts so many of k tokens; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, k + 1)) < num_accepted else (low, middle)
    return low


def _fit(cells: dict[tuple[int, int], Measured]) -> Costs:
    """Fit planes: a target pass over rows and rows * (1 + k) tokens, a draft pass over rows."""
    drafted = {cell: found for cell, found in cells.items() if cell[1]}
    target = _solve([[1, rows, rows * (1 + k)] for rows, k in cells], [found.target_ms for found in cells.values()])
    draft = _solve([[1, rows] for rows, _ in drafted], [found.draft_ms for found in drafted.values()])
    return Costs(
        target=Plane(*target),
        draft=Plane(draft[0], token_ms=draft[1]),
        network_ms=0.0,
        overhead_ms=float(np.mean([found.overhead_ms for found in cells.values()])),
        acceptance=float(np.mean([found.acceptance for found in drafted.values()])),
        rank_exponent=1.0,
    )


def _solve(rows: list[list[int]], values: list[float]) -> list[float]:
    return [float(value) for value in np.linalg.lstsq(np.array(rows, float), np.array(values), rcond=None)[0]]


def _rest(found: Outcome) -> tuple[str, str, str]:
    hit_rate = "-" if found.hit_rate is None else f"{found.hit_rate:.2f}"
    return f"{found.mean_acceptance_length:.2f}", hit_rate, f"{found.mean_draft_length:.1f}"
