"""CausalLM: a transformers model with paged attention, run over a batch of tokens.

Definitions, configs and weight names are transformers' own; ours are the attention function, fused projections, half
weights and, under tensor parallelism, the slicing. What cannot be served exactly is refused while loading, with the
reason.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig, ModelInfo
from engine.errors import ModelError
from engine.execution.attention import ATTENTION_NAME, KVTensors
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.execution.cpu import packages as compilation
from engine.execution.cpu.compiled import (
    CompiledForward,
    CompileError,
    Step,
    call,
    can_run,
    example,
    load_noise,
    samples,
)
from engine.execution.cpu.half_weights import PanelLinear, has_large_layers, pack_layers
from engine.execution.cpu.huge_pages import HUGE_PAGE_BYTES, collapse
from engine.models.fusion import fuse_projections
from engine.models.registry import eos_token_ids, read_config
from engine.models.shards import load_shard
from engine.sampling.noise import Draws

if TYPE_CHECKING:
    from engine.execution.cpu.threads import Threads

logger = logging.getLogger(__name__)

_HUGE_PAGES_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor-parallel model.

    `all_reduce` sums a partial result over the ranks, in place, and returns it.
    """

    rank: int
    world_size: int
    all_reduce: Callable[[Tensor], Tensor]


class CausalLM:
    """A decoder-only language model on one device, or one rank's shard of it.

    Attributes:
        threads: how many passes run with; None leaves that to torch.
        when_compiled: called, in a thread of its own, once passes run compiled that ran eagerly before.
    """

    def __init__(self, module: nn.Module, config: PreTrainedConfig, info: ModelInfo, shard: Shard | None) -> None:
        self.module = module
        self.config = config
        self.info = info
        self.shard = shard
        parameter = next(module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._num_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        self._windows: list[int | None] = []
        self._compiled: CompiledForward | None = None
        self.threads: Threads | None = None
        self.when_compiled: Callable[[], None] | None = None

    @classmethod
    def load(cls, config: ModelConfig, *, shard: Shard | None = None) -> "CausalLM":
        """Load a model, or this rank's shard of it, and try it on two tokens.

        Raises:
            ModelError: no such model, no safetensors, or an architecture that cannot be served.
        """
        started = time.monotonic()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        model_config = read_config(config)
        if shard is None or shard.world_size == 1:
            module = _load_whole(config, dtype, device)
        else:
            module = load_shard(config, model_config, shard, dtype, device)
        module.eval().requires_grad_(False)
        fuse_projections(module)
        info = ModelInfo(
            name=config.path,
            vocab_size=model_config.get_text_config().vocab_size,
            max_model_len=int(model_config.get_text_config().max_position_embeddings),
            eos_token_ids=eos_token_ids(config, model_config),
            num_parameters=sum(p.numel() for p in module.parameters()),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
        )
        model = cls(module, model_config, info, shard)
        if has_large_layers(module):
            model._use_half_weights()
        model._probe()
        size = f"{info.num_parameters / 1e6:.1f} M parameters in {info.dtype}"
        logger.info("%s: %s on %s, loaded in %.1f s", info.name, size, info.device, time.monotonic() - started)
        if config.compile == "auto":
            model._compile_in_background(config)
        return model

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, this rank's key/value heads, and their size."""
        config = self.config.get_text_config()
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return config.num_hidden_layers, kv_heads // (self.shard.world_size if self.shard else 1), head_dim

    def kv_tensors(self, num_blocks: int, block_size: int) -> KVTensors:
        """Allocate a KV cache for this model."""
        return KVTensors(self.kv_shape, num_blocks, block_size, torch.empty(0, dtype=self.dtype, device=self.device))

    def kv_block_bytes(self, block_size: int) -> int:
        """Memory of one block over all layers."""
        layers, kv_heads, head_dim = self.kv_shape
        return 2 * layers * kv_heads * head_dim * block_size * self.dtype.itemsize

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a batch: keys and values go to their slots.

        Returns:
            [n, vocab] float32 logits at `batch.logit_indices`; [0, vocab] when none are wanted.
        """
        self._use_threads(batch)
        if self._compiled is None:
            return self._forward_eagerly(batch)
        return self._compiled(batch)[0] if can_run(batch) else self._compiled.in_pieces(batch)

    def can_draw(self, batch: ForwardBatch) -> bool:
        """Whether the pass of a batch can also draw tokens: whether it runs compiled."""
        return self._compiled is not None and can_run(batch)

    @torch.inference_mode()
    def forward_and_draw(self, batch: ForwardBatch, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a batch for which `can_draw` holds.

        Returns:
            [n, vocab] logits, [n, vocab] `noise.scores` and [n] tokens.
        """
        assert self._compiled is not None
        self._use_threads(batch)
        return self._compiled(batch, draws)

    @property
    def is_compiled(self) -> bool:
        """Whether passes run compiled."""
        return self._compiled is not None

    def compile(self) -> None:
        """Run compiled from now on; takes a minute where it was never done before.

        Raises:
            CompileError: this model cannot be compiled here, or would compute something else.
        """
        if (reason := self._reason_not_to_compile()) is not None:
            raise CompileError(reason)
        compilation.load_kernels()
        kv, step = self.kv_tensors(16, 16), self._step
        with torch.inference_mode():
            compilation.compile_once(self._package, lambda to: compilation.compile_step(step, *example(kv), to))
        compilation.compile_once(compilation.noise_path(), compilation.compile_noise)
        self._adopt()

    def use_compiled(self) -> bool:
        """Run compiled if that was done before; return whether passes do."""
        if self._reason_not_to_compile() is None and self._was_compiled():
            self._try_to_adopt()
        return self.is_compiled

    def _compile_in_background(self, config: ModelConfig) -> None:
        """Run compiled, now if that was done before, else as soon as a process of its own has done it."""
        if (reason := self._reason_not_to_compile()) is not None:
            logger.info("%s runs eagerly: %s", config.path, reason)
            return
        if self._was_compiled():
            self._try_to_adopt()
        else:
            found = [path.exists() for path in self._parts]
            text = "%s: compiling in the background, eager until then (%d of %d parts found in the cache)"
            logger.info(text, config.path, sum(found), len(found))
            compilation.Compiling(config, self.info.dtype, self._take_compiled)

    @functools.cached_property
    def _step(self) -> Step:
        step = Step(self.module, self._windows)
        self._log_half_weights(step)
        return step

    def _use_half_weights(self) -> None:
        try:
            compilation.load_kernels()
        except (CompileError, OSError) as error:
            logger.info("%s: all weights are float32 in memory: %s", self.info.name, error)
        else:
            pack_layers(self.module)
            self._log_half_weights(self.module)

    def _log_half_weights(self, module: nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, PanelLinear | nn.Linear)]
        num_packed = sum(isinstance(layer, PanelLinear) for layer in layers)
        logger.info("%s: %d of %d linear layers have 16-bit weights", self.info.name, num_packed, len(layers))

    @functools.cached_property
    def _package(self) -> Path:
        return compilation.package_path(self._step, self.config)

    def _was_compiled(self) -> bool:
        return all(path.exists() for path in self._parts)

    @property
    def _parts(self) -> list[Path]:
        return [self._package, compilation.noise_path(), compilation.kernels_path()]

    def _reason_not_to_compile(self) -> str | None:
        if self.device.type != "cpu":
            return "it is not on a CPU"
        if self.shard is not None and self.shard.world_size > 1:
            return "it is one of several ranks"
        if self._num_bytes > compilation.MAX_BYTES:
            return "it is bound by memory, not by calls"
        if not compilation.has_compiler():
            return "there is no C++ compiler"
        return None

    def _try_to_adopt(self) -> None:
        try:
            self._adopt()
        except (CompileError, OSError, RuntimeError) as error:
            logger.warning("%s runs eagerly: %s", self.info.name, error)

    @torch.inference_mode()
    def _adopt(self) -> None:
        """Take the package, after comparing it with the eager pass on batches of several shapes."""
        started = time.monotonic()
        compilation.load_kernels()
        candidate = CompiledForward(self._package, self._step)
        kv = self.kv_tensors(16, 16)
        for rows in samples():
            batch = build(rows, kv)
            candidate.check(batch, self._forward_eagerly(batch))
        load_noise(compilation.noise_path())
        self._compiled = candidate
        # Nothing computes with it any more, and where weights are packed, half of the memory or more is its own.
        self.module = self._step.module
        logger.info("%s: compiled pass loaded and checked in %.1f s", self.info.name, time.monotonic() - started)

    def _take_compiled(self) -> None:
        self._try_to_adopt()
        if self.is_compiled:
            self.use_huge_pages()  # the packed weights have come since
            if self.when_compiled is not None:
                self.when_compiled()

    def use_huge_pages(self) -> None:
        """Move this process's memory to huge pages if passes read enough of it; see `huge_pages.collapse`."""
        if self._gains_by_huge_pages:
            _move_to_huge_pages(self.info.name)

    def use_huge_pages_soon(self) -> None:
        """Do it in the background, a little later: what this model works with may still be loading."""
        if self._gains_by_huge_pages:
            timer = threading.Timer(_HUGE_PAGES_AFTER_S, _move_to_huge_pages, [self.info.name])
            timer.daemon = True
            timer.start()

    @property
    def _gains_by_huge_pages(self) -> bool:
        return self.device.type == "cpu" and self._num_bytes >= HUGE_PAGE_BYTES

    def _use_threads(self, batch: ForwardBatch) -> None:
        if self.threads is not None:
            self.threads.use(len(batch.token_ids))

    def _forward_eagerly(self, batch: ForwardBatch) -> Tensor:
        return call(self.module, batch.token_ids, batch.positions, batch.logit_indices, batch.paged).float()

    def _probe(self) -> None:
        """Run two tokens through every layer: unknown attention features raise here, not in a round."""
        kind = type(self.module).__name__
        try:
            kv = self.kv_tensors(2, 16)
            self.forward(build([ForwardRow([0, 0], 0, [1], 1)], kv))
            step = build([ForwardRow([0], 2, [1], 1)], kv)
            self.forward(step)
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            raise ModelError(f"{kind} is not built like the models served here: {error}") from error
        self._windows = step.paged.groups[0].windows


def _move_to_huge_pages(name: str) -> None:
    started = time.monotonic()
    moved, wanted = collapse()
    text = "%s: %.0f of %.0f MB of this process on huge pages after %.1f s"
    logger.info(text, name, moved / 1e6, wanted / 1e6, time.monotonic() - started)


def resolve_device(device: str) -> torch.device:
    """Return the device that `device` names; auto is CUDA where there is one.

    Raises:
        ModelError: CUDA was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, but no CUDA device is visible to this process")
    return torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `dtype` names; auto is bfloat16 on CUDA and on CPUs with AMX, else float32."""
    if dtype != "auto":
        resolved = getattr(torch, dtype)
        assert isinstance(resolved, torch.dtype)
        return resolved
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    # With AVX512-BF16 alone products take up to twice as long as in float32 (oneDNN 3.12, Emerald Rapids without AMX).
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def _load_whole(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load {config.path}: {error}") from error
    return module.to(device)
