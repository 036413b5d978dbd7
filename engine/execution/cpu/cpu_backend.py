"""CpuBackend: compiled passes, packed 16-bit weights, and a number of threads for each pass."""

import functools
import itertools
import logging
import time
import timeit
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import CompileProgress
from engine.execution.backend import Part, PassOutput
from engine.execution.batch import ForwardBatch, build
from engine.execution.cpu.compilation import packages
from engine.execution.cpu.compilation.background_compiler import BackgroundCompiler
from engine.execution.cpu.compilation.compiled_forward import (
    CompiledForward,
    CompileError,
    Step,
    can_run,
    example,
    load_noise,
    samples,
)
from engine.execution.cpu.host import num_threads
from engine.execution.cpu.kernels.panel_linear import PanelLinear, pack_large_model
from engine.execution.eager import EagerBackend
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import CausalLM
from engine.models.source import ModelSource
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)


class CpuBackend(EagerBackend):
    """Runs a model on the CPU: eagerly at first, compiled as soon as its package exists."""

    def __init__(
        self,
        model: CausalLM,
        source: ModelSource,
        *,
        whole: "CpuBackend | None" = None,
        part: Part = lambda model: model,
    ) -> None:
        """Pack the weights; in `beside`, `part` derives this model from the model of the backend `whole`."""
        self._whole, self._part = whole, part
        self._beside: list[CpuBackend] = []
        self._source = source
        self._num_bytes = sum(tensor.nbytes for tensor in [*model.module.parameters(), *model.module.buffers()])
        self._compiled: CompiledForward | None = None
        self._compiler: BackgroundCompiler | None = None
        if model.info.start_id is None:  # what encodes inputs reads the weights of its layers
            _pack(model)
        self._max_threads: int = whole._max_threads if whole else source.config.num_threads or torch.get_num_threads()
        torch.set_num_threads(self._max_threads)
        super().__init__(model)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, draws: Draws | None = None) -> PassOutput:
        """Compute a batch; see `Backend.run`."""
        torch.set_num_threads(num_threads(self.info.num_parameters * batch.num_tokens, self._max_threads))
        compiled = self._compiled
        if compiled is None:
            return super().run(batch, draws)
        if can_run(batch):
            return PassOutput(*compiled(batch, draws))
        logits = compiled.in_pieces(batch)
        scores = logits if draws is None else noise.noised_logits(logits, draws)
        return PassOutput(logits, scores, scores.argmax(-1))

    @torch.inference_mode()
    def assign(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights in place; see `Backend.assign`."""
        steps = [self._step.module] if "_step" in self.__dict__ else []
        for module, (name, weight) in itertools.product({self.model.module, *steps}, weights.items()):
            layer, _, parameter = name.rpartition(".")
            owner: Any = module.get_submodule(layer)
            if isinstance(owner, PanelLinear) and parameter == "weight":
                owner.refill(weight)
            else:
                getattr(owner, parameter).copy_(weight)

    @property
    def compiling(self) -> list[CompileProgress]:
        """Progress of this model, and of the models beside it, that are not compiled yet."""
        compilers = [backend._compiler for backend in (self, *self._beside)]
        return [progress for compiler in compilers if compiler and (progress := compiler.progress)]

    def warm_up(self, *, compile_missing: bool = True) -> None:
        """Load compiled passes from the cache, or once a background process has compiled them."""
        if self._source.config.compile == "auto":
            if (reason := self._reason_not_to_compile()) is not None:
                logger.info("%s runs eagerly: %s", self.info.name, reason)
            elif all(path.exists() for path in self._package_files):
                self._try_to_adopt()
            elif compile_missing:
                self._compiler = BackgroundCompiler(
                    self._source,
                    self.info.dtype,
                    self._package_files,
                    self._try_to_adopt,
                    num_layers=self.model.kv_shape.layers,
                    is_self_draft=self._whole is not None and not self.model.is_part,
                )
        for backend in self._beside:
            backend.warm_up(compile_missing=compile_missing)

    def beside(self, part: Part, kv: KVTensors) -> "tuple[CpuBackend, KVTensors]":
        """Return a part of this model; see `Backend.beside`."""
        model = part(self.model)
        other = CpuBackend(model, self._source, whole=self, part=part)
        self._beside.append(other)
        seen_kv = kv.first_layers(model.num_cached_layers, model.num_slot_layers)
        other._newest_kv = weakref.ref(seen_kv)
        return other, seen_kv

    def allocate_kv(self, num_blocks: int, block_size: int, num_slots: int = 0, depth: int = 0) -> KVTensors:
        """Allocate a KV cache for this model; see `Backend.allocate_kv`."""
        kv = super().allocate_kv(num_blocks, block_size, num_slots, depth)
        self._newest_kv = weakref.ref(kv)
        return kv

    def compile(self) -> None:
        """Compile and load the passes (a minute if not cached); raise CompileError if they differ from eager passes."""
        if (reason := self._reason_not_to_compile()) is not None:
            raise CompileError(reason)
        kv, step = self.allocate_kv(16, 16), self._step
        with torch.inference_mode():
            packages.compile_once(self._package, lambda path: packages.compile_step(step, *example(kv), path))
        # The noise, which models share, comes last: models that compile at the same time then need not wait.
        packages.compile_once(packages.noise_path(), packages.compile_noise)
        self._adopt()

    @functools.cached_property
    def _step(self) -> Step:
        module = self.model.module
        if self._whole is not None:  # so that both share packed weights, too
            module = self._part(replace(self._whole.model, module=self._whole._step.module)).module
        return Step(module)

    @functools.cached_property
    def _package(self) -> Path:
        return packages.package_path(self._step, *self.model.configurations)

    @property
    def _package_files(self) -> list[Path]:
        return [self._package, packages.noise_path(), packages.kernels_path()]

    def _reason_not_to_compile(self) -> str | None:
        if self._whole is not None:
            return self._whole._reason_not_to_compile()
        shard = self.model.shard
        if shard is not None and shard.world_size > 1:
            return "it is one of several ranks"
        if (reason := self.model.why_eager(self.model.config)) is not None:
            return reason
        if self.model.is_split:
            return "a part of it is in another process"
        if self.model.kv_dtype is not None:
            return f"its KV cache is {self.model.kv_dtype}"
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
        started = time.monotonic()
        packages.load_kernels()
        candidate = CompiledForward(self._package, self._step)
        served_kv = self._newest_kv()
        kv, eager_kv = self.allocate_kv(16, 16), self.allocate_kv(16, 16)
        if kv.states is not None and eager_kv.states is not None:
            kv.states.copy_(eager_kv.states.normal_())
        for rows in samples():
            candidate.check(build(rows, kv), self.logits(build(rows, eager_kv)), eager_kv)
        self._check_speed(candidate, served_kv or kv)
        load_noise(packages.noise_path())
        self._compiled = candidate
        # Frees the eager module, whose unpacked weights take half of the memory or more.
        self.model.replace_module(self._step.module)
        logger.info("%s: compiled pass loaded and checked in %.1f s", self.info.name, time.monotonic() - started)

    def _check_speed(self, candidate: CompiledForward, kv: KVTensors) -> None:
        batch = build([ForwardRow([1], 0, [0], 1)], kv)  # writes to block 0, as the cache may be in use
        torch.set_num_threads(num_threads(self.info.num_parameters, self._max_threads))
        runs = (lambda: candidate(batch), lambda: self.logits(batch))
        compiled_s, eager_s = (min(timeit.repeat(run, number=1)) for run in runs)  # other processes may use the cores
        if compiled_s >= eager_s:
            raise CompileError(f"a compiled pass takes {1e3 * compiled_s:.1f} ms, an eager one {1e3 * eager_s:.1f} ms")


def bytes_per_weight(dtype: torch.dtype) -> int:
    """Return the peak bytes of a weight while it loads: float32 weights are freed after they are packed to 16 bits."""
    return dtype.itemsize + (2 if dtype == torch.float32 else 0)


def _pack(model: CausalLM) -> None:
    try:
        pack_large_model(model.module, model.info.name, packages.load_kernels)
    except (CompileError, OSError) as error:
        logger.info("%s: weights are converted in every pass, or float32 in memory: %s", model.info.name, error)
