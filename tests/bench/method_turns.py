"""One loaded pair under many methods: an engine for each of them, and what a turn of it takes."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig, ModelConfig
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.registry import METHODS, DraftModel, choose_method
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.backend import Backend
from engine.execution.eager import EagerBackend
from engine.execution.registry import load_backend
from engine.llm import run_in_process
from engine.sampling.params import SamplingParams
from engine.verification.verifier import ModelVerifier
from tests.bench.method_cells import ADAPTIVE, PLAIN
from tests.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Contender:
    """A method with its rule and its draft length."""

    method: str
    verification: str
    num_tokens: int
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method's name in the tables."""
        return self.method + (ADAPTIVE if self.is_adaptive else "")

    @property
    def is_adaptive(self) -> bool:
        """Whether its engine chooses the draft lengths."""
        return self.settings.get("speculation") == "adaptive"


def contenders(
    methods: Sequence[str],
    rules: Sequence[str],
    lengths: Sequence[int],
    adaptive: Sequence[str],
    self_draft_layers: int = 4,
) -> Iterator[Contender]:
    """Yield plain decoding, and each pair that the engine takes at each length and, for `adaptive` ones, at any."""
    yield Contender(PLAIN, "coupled", 0)
    for method, rule in itertools.product(methods, rules):
        own = {"self_draft_layers": self_draft_layers} if METHODS[method].runs_in == "target" else {}
        try:
            config = EngineConfig(drafting=method, verification=rule, **own)  # type: ignore[arg-type]
            choose_method(config, has_draft_model=True)
        except ConfigError:
            continue
        for length in lengths:
            yield Contender(method, rule, length, {"speculation": "fixed"} | own)
        if method in adaptive:
            yield Contender(method, rule, max(lengths), {"speculation": "adaptive"} | own)


@dataclass(slots=True)
class Turn:
    """What a batch took.

    Attributes:
        passes: those that committed tokens of a request after its first, over all requests.
        first_s: seconds until the first token of each request.
    """

    seconds: float
    texts: list[list[int]]
    passes: int
    first_s: list[float]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a request per pass, the pass that ended its prompt not counted."""
        num_tokens = sum(len(text) - 1 for text in self.texts)
        return num_tokens / self.passes if self.passes else 1.0


class LoadedPair:
    """A target and a draft. All engines share them and the KV cache of each rule's verifier, one after the other."""

    def __init__(self, workload: Workload, *, max_num_seqs: int, max_length: int) -> None:
        """Load both models; `max_length` bounds the tokens of a request, drafts included."""
        self.target, self.draft = (
            load_backend(ModelConfig(path, dtype=workload.dtype, device=workload.device, compile=workload.compile))
            for path in (workload.target, workload.draft)
        )
        for backend in (self.target, self.draft):
            backend.warm_up()
        self._max_num_seqs = max_num_seqs
        self._num_blocks = max_num_seqs * (1 + max_length // EngineConfig.block_size)
        self._verifiers: dict[tuple[str, str], ModelVerifier] = {}

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """The memory of the target's and of the draft's weights."""
        return _weight_bytes(self.target), _weight_bytes(self.draft)

    def engine(self, contender: Contender, *, remembers_outputs: bool = False) -> Engine:
        """Return an engine for a contender; no keys and values of a request are kept for the next one.

        Args:
            remembers_outputs: whether a method that copies may copy from earlier outputs.
        """
        settings: dict[str, object] = {
            "drafting": contender.method,
            "verification": contender.verification,
            "enable_prefix_caching": False,
        }
        config = EngineConfig(
            num_speculative_tokens=contender.num_tokens,
            num_blocks=self._num_blocks,
            max_num_seqs=self._max_num_seqs,
            **(settings | contender.settings),  # type: ignore[arg-type]
        )
        method = choose_method(config, has_draft_model=True)
        info = self.target.info
        drafting = replace(config, enable_prefix_caching=remembers_outputs)
        drafter = method.make(drafting, DraftModel(self.draft, info.vocab_size) if method.loads_model else None)
        key = contender.verification, contender.method if method.make_in_target else ""
        if key not in self._verifiers:
            self._verifiers[key] = ModelVerifier(self.target, config, make_drafter=method.make_in_target)
        verifier = self._verifiers[key]
        return Engine(
            config,
            drafter=method.drafter_of_engine(drafting, drafter),
            verifier=verifier,
            num_blocks=verifier.num_blocks,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
        )


def copies_outputs(engine: Engine) -> bool:
    """Return whether an engine's drafts may be copies of earlier outputs."""
    return isinstance(engine.drafter, SuffixDrafter | CombinedDrafter)


def run(engine: Engine, prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> Turn:
    """Continue the prompts together, each by `num_tokens` tokens."""
    texts: list[list[int]] = [[] for _ in prompts]
    first_s = [0.0] * len(prompts)
    passes = 0
    started = time.perf_counter()
    for index, ids in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True)
        engine.add(str(index), ids, params)
    while engine.has_work:
        for output in run_in_process(engine.step()):
            index = int(output.request_id)
            if texts[index]:
                passes += 1
            else:
                first_s[index] = time.perf_counter() - started
            texts[index] += output.token_ids
    return Turn(time.perf_counter() - started, texts, passes, first_s)


def _weight_bytes(backend: Backend) -> int:
    assert isinstance(backend, EagerBackend)
    module = backend.model.module
    tensors = {tensor.data_ptr(): tensor for tensor in itertools.chain(module.parameters(), module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
