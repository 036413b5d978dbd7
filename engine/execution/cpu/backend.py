"""CpuBackend: compiled passes, packed 16-bit weights, and a number of threads for each pass."""

import functools
import logging
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from engine.config import ModelConfig
from engine.execution.attention import KVTensors
from engine.execution.backend import PassOutput
from engine.execution.batch import ForwardBatch, build
from engine.execution.cpu import packages
from engine.execution.cpu.compiled import CompiledForward, CompileError, Step, can_run, example, load_noise, samples
from engine.execution.cpu.half_weights import PanelLinear, has_large_layers, pack_layers
from engine.execution.cpu.host_memory import free_bytes as free_bytes
from engine.execution.cpu.quantized_weights import QuantizedPanelLinear
from engine.execution.cpu.threads import Threads
from engine.execution.eager import EagerBackend, log_loaded
from engine.models.causal_lm import CausalLM, Shard
from engine.models.loader import load_model
from engine.models.sub_layers import thin
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)


class CpuBackend(EagerBackend):
    """Runs a model on the CPU: eagerly at first, compiled as soon as its package exists."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        max_threads: int,
        *,
        whole: "CpuBackend | None" = None,
        skipped: Collection[str] = (),
    ) -> None:
        """Pack quantised and exact 16-bit weights, if the model has large layers and no encoder.

        Args:
            whole: the backend whose model this one is without the sub-layers that are `skipped`.

        Raises:
            ModelError: see `EagerBackend`.
        """
        self._whole = whole
        self._skipped = skipped
        self._thinned: list[CpuBackend] = []
        self._config = config
        self._num_bytes = sum(tensor.nbytes for tensor in [*model.module.parameters(), *model.module.buffers()])
        self._compiled: CompiledForward | None = None
        self._threads = Threads(model.info.num_parameters, max_threads)
        if model.info.decoder_start_id is None and has_large_layers(model.module):
            _pack(model)
        super().__init__(model)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Compute a batch; see `Backend.run`."""
        self._threads.use(batch.num_tokens)
        compiled = self._compiled
        if compiled is None:
            return super().run(batch, draws)
        if can_run(batch):
            return PassOutput(*compiled(batch, draws))
        logits = compiled.in_pieces(batch)
        scores = logits if draws is None else noise.noised_logits(logits, draws)
        return PassOutput(logits, scores, scores.argmax(-1))

    @property
    def is_compiled(self) -> bool:
        """Whether passes run compiled."""
        return self._compiled is not None

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Load compiled passes from the cache, or once a background process has compiled them."""
        if self._config.compile == "auto":
            if (reason := self._reason_not_to_compile()) is not None:
                logger.info("%s runs eagerly: %s", self.info.name, reason)
            elif not self.use_compiled() and compile_missing:
                is_cached = [path.exists() for path in self._package_files]
                text = "%s: compiling in the background, eager until then (%d of %d parts in the cache)"
                logger.info(text, self.info.name, sum(is_cached), len(is_cached))
                packages.Compiling(self._config, self.info.dtype, self._try_to_adopt, self._skipped)
        for thinned in self._thinned:
            thinned.warm_up(compile_missing=compile_missing)

    def thin(self, skipped: Collection[str], kv: KVTensors) -> "tuple[CpuBackend, KVTensors]":
        """Return this model without some of its sub-layers; see `Backend.thin`."""
        model, layers = thin(self.model, skipped)
        thinned = CpuBackend(model, self._config, self._threads.max_threads, whole=self, skipped=skipped)
        self._thinned.append(thinned)
        return thinned, kv.of_layers(layers)

    def compile(self) -> None:
        """Compile and load the model's passes; this takes a minute if they are not in the cache.

        Raises:
            CompileError: the model cannot be compiled here, or its compiled passes compute something else.
        """
        if (reason := self._reason_not_to_compile()) is not None:
            raise CompileError(reason)
        packages.load_kernels()
        kv, step = self.allocate_kv(16, 16), self._step
        with torch.inference_mode():
            packages.compile_once(self._package, lambda path: packages.compile_step(step, *example(kv), path))
        packages.compile_once(packages.noise_path(), packages.compile_noise)
        self._adopt()

    def use_compiled(self) -> bool:
        """Load compiled passes if they are in the cache; return whether they are."""
        if self._reason_not_to_compile() is not None:
            return False
        was_compiled = all(path.exists() for path in self._package_files)
        if was_compiled:
            self._try_to_adopt()
        return was_compiled

    @functools.cached_property
    def _step(self) -> Step:
        module = self.model.module
        if self._whole is not None:  # so that both share packed weights, too
            module = thin(replace(self._whole.model, module=self._whole._step.module), self._skipped).model.module
        step = Step(module, self.windows)
        _log_packed(self.info.name, step)
        return step

    @functools.cached_property
    def _package(self) -> Path:
        return packages.package_path(self._step, self.model.config)

    @property
    def _package_files(self) -> list[Path]:
        return [self._package, packages.noise_path(), packages.kernels_path()]

    def _reason_not_to_compile(self) -> str | None:
        if self._whole is not None:
            return self._whole._reason_not_to_compile()
        shard = self.model.shard
        if shard is not None and shard.world_size > 1:
            return "it is one of several ranks"
        if self.info.decoder_start_id is not None:
            return "it is an encoder-decoder"
        if self._num_bytes > packages.MAX_BYTES:
            return "it is bound by memory, not by calls"
        if not packages.has_compiler():
            return "there is no C++ compiler"
        return None

    def _try_to_adopt(self) -> None:
        try:
            self._adopt()
        except (CompileError, OSError, RuntimeError) as error:
            logger.warning("%s runs eagerly: %s", self.info.name, error)

    @torch.inference_mode()
    def _adopt(self) -> None:
        """Load the package and use it, if it agrees with the eager pass on batches of several shapes."""
        started = time.monotonic()
        packages.load_kernels()
        candidate = CompiledForward(self._package, self._step)
        kv = self.allocate_kv(16, 16)
        for rows in samples():
            batch = build(rows, kv)
            candidate.check(batch, self.logits(batch))
        load_noise(packages.noise_path())
        self._compiled = candidate
        # Frees the eager module, whose unpacked weights take half of the memory or more.
        self.model.module = self._step.module
        logger.info("%s: compiled pass loaded and checked in %.1f s", self.info.name, time.monotonic() - started)


def load_cpu(config: ModelConfig, dtype: torch.dtype, shard: Shard | None) -> CpuBackend:
    """Load a model for the CPU; its passes use at most `num_threads` threads, by default as many as torch.

    Raises:
        ModelError: the model cannot be served.
    """
    started = time.monotonic()
    max_threads = config.num_threads or torch.get_num_threads()
    torch.set_num_threads(max_threads)
    model = load_model(config, device=torch.device("cpu"), dtype=dtype, shard=shard)
    backend = CpuBackend(model, config, max_threads)
    log_loaded(backend, time.monotonic() - started)
    return backend


def fastest_dtype() -> torch.dtype:
    """Return bfloat16 on CPUs with AMX, else float32.

    With AVX512-BF16 but no AMX, products take up to twice as long as in float32 (oneDNN 3.12, Emerald Rapids).
    """
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def bytes_per_weight(dtype: torch.dtype) -> int:
    """Return a weight's peak memory during loading: float32 weights are packed to 16 bits before they are freed."""
    return dtype.itemsize + (2 if dtype == torch.float32 else 0)


def _pack(model: CausalLM) -> None:
    """Pack layers whose weights are quantised or exact 16-bit numbers, if the C++ library can be loaded."""
    try:
        packages.load_kernels()
    except (CompileError, OSError) as error:
        logger.info("%s: weights are converted in every pass, or float32 in memory: %s", model.info.name, error)
    else:
        pack_layers(model.module)
        _log_packed(model.info.name, model.module)


def _log_packed(name: str, module: nn.Module) -> None:
    layers = [layer for layer in module.modules() if isinstance(layer, PanelLinear | QuantizedPanelLinear | nn.Linear)]
    num_packed = sum(isinstance(layer, PanelLinear) for layer in layers)
    num_quantized = sum(isinstance(layer, QuantizedPanelLinear) for layer in layers)
    text = "%s: %d of %d linear layers have 16-bit weights, %d quantised ones"
    logger.info(text, name, num_packed, len(layers), num_quantized)
