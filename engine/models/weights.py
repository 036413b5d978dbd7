"""Weights: reads a model's safetensors files, or one rank's part of every tensor in them, into a module."""

from collections.abc import Callable
from typing import NamedTuple

from safetensors import safe_open
from torch import nn

from engine.errors import ModelError
from engine.models.source import ModelSource


class Window(NamedTuple):
    """The part of a tensor from `start` to `stop` along an axis; None is the end."""

    axis: int
    start: int
    stop: int | None


WHOLE = Window(0, 0, None)


def restore_buffers(module: nn.Module) -> None:
    """Let transformers recompute buffers that are in no file, such as rotary frequencies."""
    for child in module.modules():
        if child._non_persistent_buffers_set:
            module._init_weights(child)  # type: ignore[operator]


def fill(source: ModelSource, module: nn.Module, window: Callable[[str, list[int]], Window]) -> None:
    """Copy the window of every weight, by its name and whole shape, from the files; tied names share a tensor.

    Raises:
        ModelError: the files lack a weight.
    """
    tensors = module.state_dict(keep_vars=True)
    loaded = set()
    for file in source.weight_files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if name not in tensors:
                    continue
                weight = weights.get_slice(name)
                axis, start, stop = window(name, weight.get_shape())
                part = weight[start:stop] if axis == 0 else weight[:, start:stop]
                tensors[name].data.copy_(part)
                loaded.add(id(tensors[name]))
    if missing := [name for name, tensor in tensors.items() if id(tensor) not in loaded]:
        raise ModelError(f"{source.path} lacks the weights {', '.join(sorted(missing)[:3])}")
