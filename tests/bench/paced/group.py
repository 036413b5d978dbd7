"""What a paced group in virtual time is made of: models and roles; and how its decoding is timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.transport import Link
from cluster.workers.draft_queue import DraftQueue
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig, ModelConfig, ModelInfo
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import method_of
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.engine import Engine
from engine.execution.backend import Backend
from engine.execution.registry import make_backend
from engine.heads.registry import load_target
from engine.models.loader import load_model
from engine.models.registry import open_model
from engine.models.source import ModelSource
from engine.params import SamplingParams
from engine.sampling.grammar import Grammars
from engine.verification.verifier import ModelVerifier
from tests.bench.workload import Arm

SPARE_TOKENS = 128
"""Tokens of each row for drafts, and for the scratch places of running ahead."""


def config_of(arm: Arm, num_rows: int, longest: int, drafting: str = "model") -> EngineConfig:
    """Return settings for so many rows of at most `longest` tokens, whose caches are never full."""
    per_row = 2 + arm.k
    config = EngineConfig(
        num_speculative_tokens=max(1, arm.k),
        speculation=arm.speculation,
        drafting=drafting,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(1024, num_rows * per_row),
        enable_prefix_caching=False,
    )
    return replace(config, num_blocks=num_rows * -(-(longest + SPARE_TOKENS) // config.block_size) + 1)


@dataclass(frozen=True, slots=True)
class Models:
    """The two models of a pair, each loaded once for all roles of a process, which have caches of their own."""

    target: Backend
    draft: Backend
    target_source: ModelSource

    @classmethod
    def load(cls, target: str, draft: str) -> Self:
        sources = [open_model(ModelConfig(path, device="cpu", dtype="float32")) for path in (target, draft)]
        models = load_target(sources[0]), load_model(sources[1])
        return cls(make_backend(models[0], sources[0]), make_backend(models[1], sources[1]), sources[0])

    def verifier(self, config: EngineConfig, pace: Callable[[Backend], Backend]) -> ModelVerifier:
        return ModelVerifier(pace(self.target), config, self._grammars())

    def drafts(
        self,
        config: EngineConfig,
        pace: Callable[[Backend], Backend],
        clock: Callable[[], float],
        *,
        run_ahead: bool,
        num_groups: int = 1,
    ) -> DraftQueue:
        """Return what drafts for so many groups, as a draft worker makes it."""
        assert config.num_blocks is not None
        draft = DraftModel(pace(self.draft), self.target.info.vocab_size, self._grammars(), run_ahead)
        settings = replace(
            config, max_num_seqs=num_groups * config.max_num_seqs, num_blocks=num_groups * config.num_blocks
        )
        capacity = 4 * config.max_num_seqs
        queue = DraftQueue([draft], settings, capacity=capacity, is_shared=num_groups > 1, clock=clock)
        # A drafter that runs ahead is made by the method, which knows no clock but the machine's.
        queue._make = lambda settings, draft: RunAheadDrafter(draft, settings, clock=clock)
        return queue

    def _grammars(self) -> Grammars:
        info = self.target.info
        return Grammars(self.target_source, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)


def answer_verifications(verifier: ModelVerifier, config: EngineConfig) -> TargetResponder:
    """Return what answers the Router's messages, as a target worker makes it."""
    return TargetResponder(verifier, rank=0, capacity=4 * config.max_num_seqs, version=1)


def use(drafter: RemoteDrafter, link: Link) -> None:
    """Draft with the worker at the end of a link, whatever fails."""
    drafter.connect(link, lambda _: use(drafter, link))


def make_engine(
    arm: Arm, config: EngineConfig, info: ModelInfo, clock: Callable[[], float]
) -> tuple[Engine, RemoteDrafter, RemoteVerifier]:
    """Return an engine as a Router makes it, and its two roles, which are not connected yet."""
    drafter = RemoteDrafter(vocab_size=info.vocab_size, timeout_s=1.0)
    verifier = RemoteVerifier(vocab_size=info.vocab_size, timeout_s=60.0)
    method = method_of(config.drafting)
    assert config.num_blocks is not None
    engine = Engine(
        config,
        info,
        drafter=method.drafter_of_engine(config, drafter if method.runs_in == "draft" else method.make(config, None)),
        verifier=verifier,
        num_blocks=config.num_blocks + 1,
        clock=clock,
        overlaps=arm.overlaps,
    )
    return engine, drafter, verifier


@dataclass(slots=True)
class Stretch:
    """Rounds of a fixed set of requests, none of which begins or ends in them.

    Attributes:
        num_tokens: committed by all requests.
        rounds_s: the seconds of each round, from the end of the round before.
        texts: all tokens of each request, those before the stretch included.
    """

    num_tokens: int = 0
    rounds_s: list[float] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / sum(self.rounds_s)


class Finish:
    """Lets several groups decode until all of them have been timed, so that nobody is timed beside idle ones."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_left = num_groups


async def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    num_warm: int,
    num_tokens: int,
    clock: Callable[[], float],
    seed: int = 0,
    finish: Finish | None = None,
) -> Stretch:
    """Time the decoding of some prompts together, by `num_tokens` tokens each on average; then end them.

    Args:
        num_warm: tokens that each request has before the stretch begins.
    """
    finish = finish or Finish()
    texts: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    longest = engine.max_model_len - max(map(len, prompts))
    for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        params = SamplingParams(temperature=temperature, seed=seed + index, max_tokens=longest, ignore_eos=True)
        engine.add(str(index), prompt, params)
    stretch, total, first, ends, is_timed = Stretch(texts=texts), 0, 0, list[float](), False
    while finish.num_left:
        await engine.run_round()
        if not (outputs := engine.take_outputs()):
            continue
        for output in outputs:
            texts[output.request_id] += output.token_ids
            total += len(output.token_ids)
        if is_timed:
            continue
        if ends:
            ends.append(clock())
        elif min(map(len, texts.values())) >= num_warm:
            first = total
            ends.append(clock())
        if ends and total - first >= num_tokens * len(prompts):
            stretch.num_tokens, is_timed = total - first, True
            finish.num_left -= 1
    stretch.rounds_s = [later - earlier for earlier, later in pairwise(ends)]
    for request_id in texts:
        engine.abort(request_id)
    return stretch
