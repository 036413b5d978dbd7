"""The self-draft: a target's first layers with its own final norm and output head, over the same weights."""

import copy
from dataclasses import replace

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.models.causal_lm import CausalLM, num_weights
from engine.models.families import keep_layers
from engine.models.layers.linear_layers import WITH_STATE, layer_kinds
from engine.models.source import ModelSource


def check_self_draft(config: EngineConfig, target: ModelSource) -> None:
    """Raise ModelError if a target cannot self-draft with the configured number of layers; nothing is loaded."""
    if (count := config.self_draft_layers) is None:
        return
    num_layers = target.configuration.get_text_config().num_hidden_layers
    if count >= num_layers:
        bounds = f"must be at most {num_layers - 1}" if num_layers > 1 else "cannot be used"
        raise ModelError(f"self_draft_layers is {count}; it {bounds}, because {target.path} has {num_layers} layers")


def first_layers(model: CausalLM, count: int) -> CausalLM:
    """Return a model of the first `count` decoder layers, which shares all weights with `model`."""
    path, layers = decoder_layers(model.module)
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise ModelError(f"{model.info.name} cannot draft for itself: {len(layers)} of its layers are in a list")
    config = copy.deepcopy(model.config)
    keep_layers(config, count)
    states = model.state_shapes[: sum(kind in WITH_STATE for kind in layer_kinds(config))]
    info = replace(model.info, num_parameters=model.info.num_parameters - sum(map(num_weights, layers[count:])))
    # Copies, because a backend may compile a module's `forward`.
    module = _replaced(model.module, path, nn.ModuleList(map(_shallow, layers[:count])))
    return replace(model, module=module, config=config, info=info, state_shapes=states)


def decoder_layers(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return the path of a model's list of decoder layers, and the layers; raise ModelError if it has no such list."""
    lists = [
        (path, list(child))
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
        and any(hasattr(inner, "layer_idx") for inner in child.modules())
    ]
    if len(lists) != 1:
        raise ModelError(f"{type(module).__name__} has {len(lists)} lists of decoder layers; drafting needs one")
    return lists[0]


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _replaced(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Return a copy of `module` with `new` at a path; its siblings are copied, too, because norms are compiled."""
    copied = _shallow(module)
    copied._modules.update((name, _shallow(child)) for name, child in module.named_children())
    name, _, inner_path = path.partition(".")
    setattr(copied, name, _replaced(module.get_submodule(name), inner_path, new) if inner_path else new)
    return copied
