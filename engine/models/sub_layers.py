"""Thinned models: a model without some of its sub-layers, over the same weights, so that it can draft for itself.

A decoder layer has two sub-layers, each of which adds its result to the hidden state: `attention.3` and `mlp.3` are
those of the layer with index 3. A sub-layer that is skipped adds nothing (Zhang et al., "Draft & Verify", 2309.08168,
section 3.1). The first N layers with the model's own final norm and head are the case in which all later sub-layers are
skipped; these layers are then not even called.
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.config import EngineConfig, ModelConfig
from engine.drafting.skip_list import layer_of
from engine.errors import ModelError
from engine.models.causal_lm import CausalLM
from engine.models.registry import read_config

_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
"""The names that transformers' decoder layers give to their sub-layers."""


class SkippedAttention(nn.Module):
    """In place of an attention sub-layer: adds nothing, and writes no keys and values."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, None]:
        """Return zeros like the hidden states, and None for the attention weights."""
        return torch.zeros_like(hidden_states), None


class SkippedMLP(nn.Module):
    """In place of an MLP: adds nothing."""

    def __init__(self, *, has_scores: bool) -> None:
        """Make it; with `has_scores`, it returns a pair, as an MLP does that returns its router's scores, too."""
        super().__init__()
        self._has_scores = has_scores

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        """Return zeros like the hidden states, and None for the scores if the layer expects some."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._has_scores else nothing


class Thinned(NamedTuple):
    """A model without some of its sub-layers.

    Attributes:
        layers: which layers of the whole model's KV cache its own layers 0, 1, ... attend to.
    """

    model: CausalLM
    layers: list[int]


def check_self_draft(config: EngineConfig, target: ModelConfig) -> None:
    """Check before a target is loaded that it has the layers with which it is to draft for itself, if it is.

    Raises:
        ModelError: as `skipped_sub_layers`, or there is no such model, or it cannot be served.
    """
    if config.self_draft_layers is not None or config.self_draft_skip is not None:
        skipped_sub_layers(config, target.path, read_config(target).get_text_config().num_hidden_layers)


def skipped_sub_layers(config: EngineConfig, model: str, num_layers: int) -> frozenset[str]:
    """Return the sub-layers that a model with `num_layers` layers skips when it drafts for itself.

    Raises:
        ModelError: the model does not have these layers, or would have nothing left to draft with, or all.
    """
    if config.self_draft_skip is not None:
        return _checked(frozenset(config.self_draft_skip), model, num_layers)
    count = config.self_draft_layers
    assert count is not None
    if count >= num_layers:
        bounds = f"must be at most {num_layers - 1}" if num_layers > 1 else "cannot be used"
        raise ModelError(f"self_draft_layers is {count}; it {bounds}, because {model} has {num_layers} layers")
    return frozenset(f"{kind}.{index}" for index in range(count, num_layers) for kind in ("attention", "mlp"))


def _checked(skipped: frozenset[str], model: str, num_layers: int) -> frozenset[str]:
    """Return the sub-layers if a model has them and an attention sub-layer is left."""
    if beyond := sorted(name for name in skipped if layer_of(name) >= num_layers):
        raise ModelError(f"self_draft_skip has {beyond[0]}, but {model} has {num_layers} layers, counted from 0")
    if sum(name.startswith("attention.") for name in skipped) == num_layers:
        raise ModelError(f"self_draft_skip has every attention sub-layer of {model}; one at least must be left")
    return skipped


def thin(model: CausalLM, skipped: Collection[str]) -> Thinned:
    """Return a model that skips some sub-layers, and shares everything else with `model`.

    Its attention sub-layers count the layers of their KV cache without those that are skipped.

    Raises:
        ModelError: the model is not made of decoder layers whose sub-layers can be told apart.
    """
    path, layers = _decoder_layers(model)
    is_left = [not {f"attention.{index}", f"mlp.{index}"} <= set(skipped) for index in range(len(layers))]
    num_left = 1 + max(index for index, left in enumerate(is_left) if left)
    thinned: list[nn.Module] = []
    attended: list[int] = []
    dropped: list[nn.Module] = list(layers[num_left:])
    for index, layer in enumerate(layers[:num_left]):
        changes: dict[str, nn.Module] = {}
        if f"attention.{index}" in skipped:
            name = _sub_layer(layer, _ATTENTION)
            changes[name] = SkippedAttention()
            dropped.append(layer.get_submodule(name))
        else:
            if len(attended) < index:
                name, attention = _attention(layer)
                changes[name] = _shallow(attention)
                changes[name].layer_idx = len(attended)  # type: ignore[assignment]
            attended.append(index)
        if f"mlp.{index}" in skipped:
            name = _sub_layer(layer, _MLP)
            mlp = layer.get_submodule(name)
            changes[name] = SkippedMLP(has_scores=_has_scores(mlp, model))
            dropped.append(mlp)
        # A copy even without changes: a backend may replace a layer's `forward` by a compiled one.
        thinned.append(_replaced(layer, changes))
    config = copy.deepcopy(model.config)
    config.get_text_config().num_hidden_layers = len(attended)
    num_parameters = model.info.num_parameters - sum(map(_num_weights, dropped))
    module = _replaced(model.module, {path: nn.ModuleList(thinned)})
    info = replace(model.info, num_parameters=num_parameters)
    return Thinned(replace(model, module=module, config=config, info=info), attended)


def _decoder_layers(model: CausalLM) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of a model's decoder layers, and these."""
    lists = [
        (name, list(child))
        for name, child in model.module.named_modules()
        if isinstance(child, nn.ModuleList)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
        and any(hasattr(inner, "layer_idx") for inner in child.modules())
    ]
    if len(lists) != 1 or len(lists[0][1]) != model.kv_shape.layers:
        raise ModelError(f"{model.info.name} cannot draft for itself: {len(lists)} lists of decoder layers in it")
    return lists[0]


def _sub_layer(layer: nn.Module, names: Collection[str]) -> str:
    """Return the name of the one child of a layer that has one of these names."""
    children = [name for name, _ in layer.named_children() if name in names]
    if len(children) != 1:
        raise ModelError(f"{type(layer).__name__} has {len(children)} sub-layers with a name of {', '.join(names)}")
    return children[0]


def _attention(layer: nn.Module) -> tuple[str, nn.Module]:
    """Return the module of a layer that names its layer of the KV cache."""
    top = _sub_layer(layer, _ATTENTION)
    for name, child in layer.named_modules():
        if name.split(".")[0] == top and isinstance(getattr(child, "layer_idx", None), int):
            return name, child
    raise ModelError(f"{type(layer).__name__} has an attention sub-layer without a layer index")


@torch.inference_mode()
def _has_scores(mlp: nn.Module, model: CausalLM) -> bool:
    """Return whether an MLP returns its router's scores, too, as that of gpt-oss does: one token shows it."""
    size = model.config.get_text_config().hidden_size
    return isinstance(mlp(torch.zeros(1, 1, size, dtype=model.dtype, device=model.device)), tuple)


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose children are the same modules, but can be replaced."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _replaced(module: nn.Module, changes: dict[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of a module with other modules at some paths; what leads there is copied, too."""
    copied = _shallow(module)
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, new in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = new
        else:
            setattr(copied, name, new)
    for name, deeper in inner.items():
        setattr(copied, name, _replaced(module.get_submodule(name), deeper))
    return copied


def _num_weights(module: nn.Module) -> int:
    """Return how many weights a module has, packed and quantised ones included, and their scales not."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "in_features")]
    counted = {id(parameter) for layer in layers for parameter in layer.parameters()}
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    others = [parameter for parameter in module.parameters() if id(parameter) not in counted]
    num_products: int = sum(layer.in_features * layer.out_features for layer in layers)
    return num_products + sum(tensor.numel() for tensor in (*biases, *others))
