"""Packed weights: replaces a model's linear layers by quantised ones, as a published checkpoint has them.

What no product of ours reads becomes floats: output heads, embeddings, experts, and layers whose groups are not alike.
What a checkpoint leaves as floats stays so: `weights.fill` reads it, as it does for any model.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.models.layers.packed_formats import FORMATS, PACKED_DTYPES, PackedFormat, PackedWeight, read_packed
from engine.models.layers.quantization import QuantizedLinear, pack_nibbles, saved_format
from engine.models.source import ModelSource
from engine.models.weights import FileNames, assign, mapped_tensors, part_of_rank, read, upload_to

logger = logging.getLogger(__name__)

_UNPACKED_BY_TRANSFORMERS = ("compressed-tensors", "fp8", "mxfp8")
MakeLayer = Callable[[nn.Linear, Tensor, Tensor, Tensor | None, Tensor | None], QuantizedLinear]
"""Makes a layer of a rank's values, scales, bias and zeros, in the place of another."""


def load_packed(
    source: ModelSource, module: nn.Module, names: FileNames, dtype: torch.dtype, device: torch.device,
    rank: int = 0, world_size: int = 1, make: MakeLayer = lambda _, *tensors: QuantizedLinear(*tensors),
) -> set[str] | None:  # fmt: skip
    """Replace the packed layers of a model on the meta device; return the names of weights that are full of floats.

    On the meta device, layers have shapes only. Of tensors in another format, transformers makes floats: None.

    Raises:
        ModelError: it does not, or a layer does not fit the model or the ranks.
    """
    saved, settings = str(saved_format(source.configuration)), source.settings["quantization_config"]
    stored = dict(mapped_tensors(source))
    parameters, modules = module.state_dict(keep_vars=True), dict(module.named_modules())
    layers: dict[str, tuple[str, PackedFormat]] = {}
    kinds = {kind for form in FORMATS[saved] for kind in form.kinds} - {"", "weight", "bias"}
    for key, tensor in stored.items():
        layer, _, kind = key.rpartition(".")
        form = next((one for one in FORMATS[saved] if _is_stored(stored, layer, one)), None)
        target = key if form is None or kind != form.weight else f"{layer}.weight"
        name = names.parameter(target)
        if form is not None and kind in form.kinds:
            if names.parameter(f"{layer}.weight") in parameters:
                layers[key] = layer, form
            is_strange = False
        else:
            is_number = tensor.dtype in PACKED_DTYPES or tensor.dtype == torch.uint8
            is_strange = (is_number or kind in kinds) and name.rpartition(".")[0] in modules
        if is_strange or (name in parameters and not names.part(target, parameters[name]).numel()):
            if world_size > 1 or saved not in _UNPACKED_BY_TRANSFORMERS:
                raise ModelError(f"{source.path}: {key} is of no form of {saved} that is served")
            return None
    head = module.get_output_embeddings()  # type: ignore[operator]
    num_parts, pending = Counter(layers.values()), dict[str, dict[str, Tensor]]()
    floats: dict[str, Tensor] = {}
    dtypes = {key: stored[key].dtype for key in layers}
    for key, _, window in read(source, dtypes, device, lambda *_: (), upload_to(device)):
        layer, form = layers[key]
        kind = key.rpartition(".")[2]
        parts = pending.setdefault(layer, {})
        parts[kind] = window if kind == "weight_shape" else window.to(device)
        if len(parts) < num_parts[layer, form]:
            continue
        weight = read_packed(f"{source.path}: {layer}", form, pending.pop(layer), settings)
        path = (name := names.parameter(f"{layer}.weight")).removesuffix(".weight")
        part, linear = names.part(f"{layer}.weight", parameters[name]), modules.get(path)
        if part_of_rank(weight.integers, part, rank, world_size).shape != part.shape:
            raise ModelError(f"{source.path}: {layer} has the shape {[*weight.integers.shape]}, not {[*part.shape]}")
        has_bias = getattr(linear, "bias", None) is not None
        if (
            isinstance(linear, nn.Linear)
            and linear is not head
            and _is_regular(weight)
            and has_bias <= ("bias" in parts)
        ):
            bias = part_of_rank(parts["bias"].to(dtype), linear.bias, rank, world_size) if has_bias else None
            values, scales, zeros = _own(layer, weight, part, rank, world_size)
            module.set_submodule(path, make(linear, values, scales, bias, zeros))
            continue
        if name not in floats:
            tied = [other for other, tensor in parameters.items() if tensor is parameters[name]]
            floats |= dict.fromkeys(tied, torch.empty_like(parameters[name], device=device))
            assign(module, tied, floats[name])
        own = part_of_rank(weight.floats(), part, rank, world_size)
        names.part(f"{layer}.weight", floats[name]).copy_(own)
    if floats:
        message = "%s: no product of ours reads %d of the packed weights, which become floats: %s"
        logger.info(message, source.path, len(floats), ", ".join(sorted(floats)[:3]))
    return set(floats)


def _is_stored(stored: dict[str, Tensor], layer: str, form: PackedFormat) -> bool:
    weight = stored.get(f"{layer}.{form.weight}")
    return weight is not None and weight.dtype in PACKED_DTYPES and f"{layer}.{form.scales}" in stored


def _is_regular(weight: PackedWeight) -> bool:
    """Return whether all groups are alike, and have an even number of 4-bit weights."""
    return weight.groups is None and weight.integers.shape[1] // weight.scales.shape[1] % (8 // weight.num_bits) == 0


def _own(layer: str, weight: PackedWeight, part: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a rank's values, scales and zeros."""
    integers, num_groups = part_of_rank(weight.integers, part, rank, size), weight.scales.shape[1]
    ranks = weight.integers.shape[1] // part.shape[1]
    if (ranks > 1 and num_groups > 1 and num_groups % ranks) or part.shape[1] % (8 // weight.num_bits):
        group = weight.integers.shape[1] // num_groups
        raise ModelError(f"{layer} has {part.shape[1]} inputs on a rank, not a multiple of its groups of {group}")
    like = torch.empty(len(part), max(1, num_groups // ranks), device="meta")
    scales = part_of_rank(weight.scales, like, rank, size).contiguous()
    zeros = None if weight.zeros is None else part_of_rank(weight.zeros, like, rank, size).contiguous()
    return pack_nibbles(integers) if weight.num_bits == 4 else integers.contiguous(), scales, zeros
