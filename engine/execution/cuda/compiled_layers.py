"""Compiled decoder layers: Inductor fuses the operators between a layer's matrix products.

All layers of a model share one compilation, whose number of tokens is symbolic. Attention is an opaque operator, which
finds keys, values and block tables in the context of the current pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from transformers.modeling_layers import GradientCheckpointingLayer
from triton import knobs  # type: ignore[import-untyped]

from engine.errors import ModelError
from engine.execution.attention import PagedContext
from engine.execution.cuda.kernels import cache_write
from engine.execution.cuda.kernels import triton_attention as paged_attention
from engine.models.layers.layer_attention import AttentionParams
from engine.stats.preparation import PREPARATION

_MAX_COMPILATIONS = 64
"""Layers of different kinds are compiled separately; a model has a few kinds."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[TritonContext] = []
        self.has_settings = False


_thread = _Thread()


@dataclass(slots=True)
class TritonContext(PagedContext):
    """The context of passes on CUDA: attends group by group with Triton kernels."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend; see `AttentionContext.attend`."""
        self.layers.append(layer)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        self.write(layer, key, value)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for group in self.groups:
            tokens = slice(group.start, group.start + group.rows * group.length)
            paged_attention.attend(group, query[:, tokens], keys, values, output[tokens], params)
        return output

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor | None = None) -> None:
        """Write without attending; see `PagedContext.write`."""
        slots = self.slots if slots is None else slots
        cache_write.write(key, value, self.kv.keys[layer], self.kv.values[layer], slots)

    @contextmanager
    def current(self) -> Iterator["OperatorContext"]:
        """Make this the thread's current pass, and return the context to give to the model."""
        apply_compile_settings()
        _thread.contexts.append(self)
        try:
            yield OperatorContext(self)
        finally:
            _thread.contexts.pop()


class OperatorContext:
    """Attends through an opaque operator, which a compiler treats as one call."""

    def __init__(self, context: TritonContext) -> None:
        self.taps = context.taps
        self.write, self.read_states, self.write_states = context.write, context.read_states, context.write_states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write, then attend, in the context of the current pass; see `AttentionContext.attend`."""
        assert params.masking is None, "models with such layers run eagerly"
        numbers = (params.window, params.scaling, params.softcap, params.sinks, params.first, params.sees_row)
        output: Tensor = torch.ops.paceline.attend_in_context(query, key, value, layer, *numbers)
        return output


@torch.library.custom_op("paceline::attend_in_context", mutates_args=())
def _attend_in_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    first: int,
    sees_row: bool,
) -> Tensor:
    params = AttentionParams(window, scaling, softcap, sinks, first=first, sees_row=sees_row)
    return _thread.contexts[-1].attend(layer, query, key, value, params)


@_attend_in_context.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


def compile_layers(module: nn.Module) -> None:
    """Compile every decoder layer, and every norm outside layers; raise ModelError if the model has no layers.

    Compilation happens at the first pass. Eager norms sum in an order that depends on the number of rows.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(module).__name__} has no decoder layers that can be compiled")
    # Some may already be compiled as a part of another model's module.
    for layer in (part for part in _compiled_parts(module) if "forward" not in part.__dict__):
        # Kernels are chosen by rule, because autotuning could round differently in the next process. This is an option
        # of each compilation, because torch resets `torch._inductor.config` after it.
        layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=True, options={"deterministic": True})


def apply_compile_settings() -> None:
    """Set how this thread compiles layers (torch 2.12 has settings per thread), and count compilations."""
    if _thread.has_settings:
        return
    # A layer's index is data, so that one compilation serves all layers.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._dynamo.config.recompile_limit = _MAX_COMPILATIONS
    knobs.runtime.jit_post_compile_hook = _observe
    if _observe not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_observe)
    _thread.has_settings = True


def _observe(*_: object, **__: object) -> None:
    PREPARATION.observe("compiled")


def uncompile_layers(module: nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in _compiled_parts(module):
        layer.__dict__.pop("forward", None)


def _compiled_parts(module: nn.Module) -> list[nn.Module]:
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    inner = {child for layer in layers for child in layer.modules()}
    for submodule in module.modules():
        if getattr(submodule, "calls_inside_layers", False):
            inner -= {*submodule.modules()}
    return layers + [child for child in module.modules() if "Norm" in type(child).__name__ and child not in inner]
