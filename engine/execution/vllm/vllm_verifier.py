"""VllmVerifier: a target that vLLM computes; rows go in, logits come out, and the rule decides as ever."""

import hashlib
import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from engine.config import CompileProgress, EngineConfig
from engine.execution.kv_tensors import KVTensors
from engine.execution.reduce import World
from engine.execution.vllm.arguments import ADAPTERS, check_version, digest_of, engine_arguments
from engine.execution.vllm.rank import start
from engine.execution.vllm.schedule import Schedule
from engine.execution.vllm.tapped_features import TappedFeatures
from engine.models.loader import resolve_device, resolve_dtype
from engine.models.source import ModelSource
from engine.protocols import Verdict, VerifyRow
from engine.sampling.grammar import Grammars
from engine.verification.decider import Decider, num_logits
from engine.verification.rule import rule_of

logger = logging.getLogger(__name__)


class VllmVerifier:
    """Verifies with vLLM's worker in this process; also its own `backend`, for whoever asks for the loaded model."""

    kv: KVTensors
    """The features of tokens, if a head on the draft worker reads them."""

    def __init__(self, source: ModelSource, engine: EngineConfig, grammars: Grammars, world: World | None) -> None:
        """Load a target or a rank of it; raise ModelError if vLLM does not serve it, ConfigError for its arguments."""
        assert engine.num_blocks is not None
        started = time.monotonic()
        device = resolve_device(source.config.device)
        dtype = resolve_dtype(source.config.dtype, device)
        self.num_blocks = engine.num_blocks + 1
        place = None if world is None else (f"tcp://{world.host}:{world.port}", world.rank, world.device.index or 0)
        dtype_name, paths = str(dtype).removeprefix("torch."), source.config.vllm.get(ADAPTERS, {})
        arguments = engine_arguments(source, engine, dtype_name, world.size if world else 1)
        adapters = {name: LoRARequest(name, nth, path) for nth, (name, path) in enumerate(paths.items(), start=1)}
        self._num_threads = source.config.num_threads or torch.get_num_threads() if device.type == "cpu" else None
        self._features = None
        if source.head is not None:
            like = torch.empty(0, dtype=dtype, device=device)
            self._features = TappedFeatures(source, self.num_blocks, engine.block_size, like)
            self.kv = self._features.kv
        layers = self._features.layers if self._features is not None else ()
        self._runner = start(arguments, device.type, self.num_blocks, [*adapters.values()], place, layers)
        self._schedule = Schedule(adapters)
        self.info = source.info(
            num_parameters=sum(torch.Size(shape).numel() for shape in source.weight_shapes.values()),
            dtype=dtype_name,
            device=str(device),
            digest=hashlib.sha256(f"{source.digest} {check_version()} {digest_of(source.config)}".encode()).hexdigest(),
            adapters=tuple(adapters),
        )
        self._decider = Decider(rule_of(engine.verification), self.info.eos_token_ids, grammars)
        message = "%s: loaded by vLLM on %s in %.1f s; %d KV blocks of %d tokens"
        logger.info(message, source.path, device, time.monotonic() - started, engine.num_blocks, engine.block_size)

    async def verify(self, rows: Sequence[VerifyRow], *, decides: bool = True) -> list[Verdict]:
        """Compute the rows and, unless another rank decides, return their verdicts."""
        planned = self._schedule.plan(rows)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # a draft in this process has set its own
        with torch.inference_mode():
            self._runner.append(planned.added)
            # Every rank computes the prompts' logits, because vLLM gathers logits over the ranks.
            logits = self._wanted(rows, self._runner.run(planned.output))
            if self._features is not None:
                self._features.write(rows, self._runner.tapped(row.request.request_id for row in rows))
            return self._decider.decide(rows, self._decider.runs(rows), logits, None) if decides else []

    def release(self, request_id: str) -> None:
        """Have vLLM forget a request in the next round, and drop its grammar matcher."""
        self._schedule.release(request_id)
        self._decider.release(request_id)

    def _wanted(self, rows: Sequence[VerifyRow], logits: Tensor) -> Tensor:
        """Return `num_logits` rows of logits for each row: those that vLLM computed, and more of prompts."""
        if all(row.reaches_tip and not row.num_prompt_logprobs for row in rows):
            return logits
        wanted, first = [], 0
        for row in rows:
            end = first + 1 + len(row.draft.token_ids)
            if row.num_prompt_logprobs:
                wanted.append(self._runner.logits_of(row.request.request_id, range(num_logits(row))))
            elif row.reaches_tip:
                wanted.append(logits[first:end])
            first = end
        return torch.cat(wanted) if wanted else logits[:0]

    @property
    def backend(self) -> "VllmVerifier":
        """The loaded model: this object."""
        return self

    @property
    def compiling(self) -> list[CompileProgress]:
        """Nothing: vLLM compiles and records while it loads."""
        return []

    def warm_up(self) -> None:
        """Do nothing: vLLM has warmed up while it loaded."""

    def enter_thread(self) -> None:
        """Make this thread ready for rounds, because each thread has its own current GPU."""
        if self.info.device.startswith("cuda"):
            torch.cuda.set_device(self.info.device)

    def close(self) -> None:
        """Do nothing: vLLM's memory and its world end with this process."""
