"""One loaded pair under many methods: an engine for each of them, and what a turn of it takes."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig, ModelConfig
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import method_of
from engine.drafting.settle import choose_method
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.registry import make_backend
from engine.heads.registry import load_target
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import run_in_process
from engine.verification.verifier import ModelVerifier
from tests.bench.workload import Workload

SELF_DRAFT_LAYERS = 4
ADAPTIVE = ("model", "model+suffix")
"""The methods that also choose their draft lengths themselves."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with its rule and its draft length, or the longest that it may choose itself."""

    method: str
    verification: str
    num_tokens: int
    is_adaptive: bool = False

    @property
    def name(self) -> str:
        return self.method + (" adaptive" if self.is_adaptive else "")

    def config(self, **settings: object) -> EngineConfig:
        return EngineConfig(
            drafting=self.method,  # type: ignore[arg-type]
            verification=self.verification,  # type: ignore[arg-type]
            num_speculative_tokens=self.num_tokens,
            speculation="adaptive" if self.is_adaptive else "fixed",
            self_draft_layers=SELF_DRAFT_LAYERS if self.method == "self" else None,
            enable_prefix_caching=False,
            **settings,  # type: ignore[arg-type]
        )


def contenders(methods: Sequence[str], rules: Sequence[str], lengths: Sequence[int]) -> Iterator[Contender]:
    """Yield plain decoding, and each pair that the engine takes at each length and, for `ADAPTIVE` ones, at any."""
    yield Contender("none", "coupled", 0)
    for method, rule in itertools.product(methods, rules):
        entries = [Contender(method, rule, length) for length in lengths]
        entries += [Contender(method, rule, max(lengths), is_adaptive=True)] if method in ADAPTIVE else []
        try:
            choose_method(entries[0].config(), has_draft_model=True)
        except ConfigError:
            continue
        yield from entries


@dataclass(slots=True)
class Turn:
    """What a batch took, and its texts as token ids.

    Attributes:
        tokens_per_pass: tokens of a request per pass, the pass that ended its prompt not counted.
    """

    seconds: float
    texts: list[list[int]]
    tokens_per_pass: float


class LoadedPair:
    """A target and a draft. All engines share them and the KV cache of each rule's verifier, one after the other."""

    def __init__(self, workload: Workload, *, max_num_seqs: int, max_length: int) -> None:
        """Load both models; `max_length` bounds the tokens of a request, drafts included."""
        settings = {"dtype": workload.dtype, "device": workload.device, "compile": workload.compile}
        places = [(workload.target, None), (workload.draft, None), (workload.target, workload.head)]
        sources = [open_model(ModelConfig(path, head=head, **settings)) for path, head in places]
        self.target, self.draft, self.with_head = (make_backend(load_target(source), source) for source in sources)
        self.draft.warm_up()
        num_blocks = max_num_seqs * (1 + max_length // EngineConfig.block_size)
        self._sizes = {"max_num_seqs": max_num_seqs, "num_blocks": num_blocks}
        self._verifiers: dict[tuple[str, str], ModelVerifier] = {}

    def engine(self, contender: Contender, *, remembers_outputs: bool = False) -> Engine:
        """Return an engine for a contender; no keys and values of a request are kept for the next one.

        Args:
            remembers_outputs: whether a method that copies may copy from earlier outputs.
        """
        config = contender.config(**self._sizes)
        method, info = method_of(config.drafting), self.target.info
        drafting = replace(config, enable_prefix_caching=remembers_outputs)
        drafter = method.make(drafting, DraftModel(self.draft, info.vocab_size) if method.runs_in == "draft" else None)
        needs_head = contender.method.startswith("head")
        key = contender.verification, contender.method if method.make_in_target or needs_head else ""
        if key not in self._verifiers:
            target = self.with_head if needs_head else self.target
            self._verifiers[key] = ModelVerifier(target, config, make_drafter=method.make_in_target)
            target.warm_up()  # with what it drafts with
        return Engine(
            config,
            info,
            drafter=method.drafter_of_engine(drafting, drafter),
            verifier=self._verifiers[key],
            num_blocks=self._verifiers[key].num_blocks,
        )


def copies_outputs(engine: Engine) -> bool:
    return isinstance(getattr(engine.drafter, "drafter", None), SuffixDrafter | CombinedDrafter)


def run(engine: Engine, prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> Turn:
    """Continue the prompts together, each by `num_tokens` tokens."""
    texts: list[list[int]] = [[] for _ in prompts]
    passes = 0
    started = time.perf_counter()
    for index, ids in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        engine.add(str(index), ids, params)
    while engine.has_work:
        for output in run_in_process(engine.step()):
            index = int(output.request_id)
            passes += bool(texts[index])
            texts[index] += output.token_ids
    seconds, num_tokens = time.perf_counter() - started, sum(len(text) - 1 for text in texts)
    return Turn(seconds, texts, num_tokens / passes if passes else 1.0)
