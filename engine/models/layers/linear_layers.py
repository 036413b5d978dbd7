"""Linear layers: gated delta rules, Mamba 2 and short convolutions, whose states are in the context of a pass.

transformers' layers call functions of their module by name. Each is replaced by a function that uses the context if it
is among the keywords of the pass, and else calls the original.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from engine.errors import ModelError
from engine.models.layers.layer_state import Recurrence, StateContext, StateShape
from engine.models.layers.quantization import on_meta
from engine.models.layers.recurrences import GatedDelta, Mamba2

WITH_STATE = {"linear_attention", "conv", "hybrid"}
WITHOUT_KV = {"linear_attention", "conv", "mlp", "moe"}
"""Configurations' names of layers that have a state, and of layers without keys and values."""


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return each layer's name in the configuration; empty if all layers are alike."""
    text = config.get_text_config()
    return list(getattr(text, "layer_types", None) or [])[: text.num_hidden_layers]


def has_state(config: PreTrainedConfig) -> bool:
    """Return whether a model has linear layers."""
    return not WITH_STATE.isdisjoint(layer_kinds(config))


def planned_states(config: PreTrainedConfig) -> tuple[list[StateShape], int]:
    """Return the result of `prepare_linear_layers` for a model that is not loaded."""
    return prepare_linear_layers(on_meta(config), config) if has_state(config) else ([], 0)


def prepare_linear_layers(module: nn.Module, config: PreTrainedConfig) -> tuple[list[StateShape], int]:
    """Give each layer the index of its state, or of its keys and values, and replace the functions that it calls.

    Returns:
        The states' sizes in order of layers, and the tokens per chunk of a prompt (0 without linear layers).

    Raises:
        ModelError: the layers differ from the configuration, or pass no keywords to their functions.
    """
    if not has_state(config):
        return [], 0
    kinds = layer_kinds(config)
    mixers = [child for child in module.modules() if _calls(child, "causal_conv1d_fn")]
    attentions = [child for child in module.modules() if _calls(child, "ALL_ATTENTION_FUNCTIONS")]
    expected = [sum(kind in WITH_STATE for kind in kinds), sum(kind not in WITHOUT_KV for kind in kinds)]
    if (counts := [len(mixers), len(attentions)]) != expected:
        raise ModelError(
            f"{type(module).__name__} has {counts[0]} linear layers and {counts[1]} with attention in this version of "
            f"transformers, but its configuration names {expected[0]} and {expected[1]}"
        )
    for index, attention in enumerate(attentions):
        attention.kv_layer = index  # type: ignore[assignment]
    embeddings: Any = module.get_input_embeddings()  # type: ignore[operator]
    token = embeddings.weight.new_zeros(1, 1, config.get_text_config().hidden_size)
    has_matrices = [kind != "conv" for kind in kinds if kind in WITH_STATE]
    shapes, chunks = [], [1]
    for index, mixer in enumerate(mixers):
        _replace_functions(type(mixer).__module__)
        mixer.state_layer = index  # type: ignore[assignment]
        mixer.register_forward_pre_hook(_name_state, with_kwargs=True)
        probe = _Probe()
        with torch.no_grad(), contextlib.suppress(TypeError):  # `forward` may take no such keyword
            mixer(token, paged=probe)
        if not probe.sizes[0] or (has_matrices[index] and not probe.matrices):
            raise ModelError(
                f"{type(mixer).__name__} in this version of transformers hands no keywords to its functions"
            )
        shapes.append(StateShape(*probe.sizes, *probe.matrices))
        chunks.append(probe.chunk)
    return shapes, math.lcm(*chunks)


def _calls(module: nn.Module, function: str) -> bool:
    return function in inspect.unwrap(type(module).forward).__code__.co_names


def _name_state(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return arguments, {**keywords, "state_layer": module.state_layer}


class _Probe:
    """Notes the sizes of a layer's state."""

    sizes = (0, 0)
    matrices: tuple[int, ...] = ()
    chunk = 1

    def convolve(self, _layer: int, inputs: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
        self.sizes = (weight.shape[0], weight.shape[1] - 1)
        return inputs

    def recur(self, _layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        self.matrices, self.chunk = recurrence.sizes(inputs), recurrence.chunk
        return recurrence.output(inputs[0].new_zeros(len(inputs[0]), *self.matrices[:3]).float(), inputs)


def _replacement(original: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if "state_layer" not in keywords:
            return original(*arguments, **keywords)
        if "paged" not in keywords:
            raise ModelError("its layers do not pass keyword arguments on to their linear layers")
        paged = keywords.pop("paged")
        context = paged if isinstance(paged, _Probe) else paged.kv.extras.of(paged)
        return compute(original, context, keywords.pop("state_layer"), *arguments, **keywords)

    return call


def _convolve(
    _: Any, context: StateContext, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None, **keywords: Any
) -> Tensor:
    outputs = context.convolve(layer, x[0].transpose(0, 1), weight, bias)
    if (activation := keywords.get("activation")) is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.transpose(0, 1).unsqueeze(0)


def _gated_delta(
    original: Any, context: StateContext, layer: int, query: Tensor, key: Tensor, value: Tensor, **keywords: Any
) -> tuple[Tensor, None]:
    assert keywords["use_qk_l2norm_in_kernel"]
    inputs = [tensor[0] for tensor in (query, key, value, keywords["g"], keywords["beta"])]
    return context.recur(layer, GatedDelta(original), inputs).unsqueeze(0), None


def _mamba2(original: Any, context: StateContext, layer: int, *tensors: Tensor, **keywords: Any) -> Tensor:
    assert keywords["dt_softplus"]
    x, dt, a, b, c = tensors
    sizes = keywords["chunk_size"], a, keywords["D"], keywords["dt_bias"], keywords["dt_limit"]
    return context.recur(layer, Mamba2(original, *sizes), [x[0], dt[0], b[0], c[0]]).unsqueeze(0)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _mamba2,
}


@functools.cache
def _replace_functions(name: str) -> None:
    module = sys.modules[name]
    for function in _FUNCTIONS.keys() & vars(module).keys():
        setattr(module, function, _replacement(getattr(module, function), _FUNCTIONS[function]))
