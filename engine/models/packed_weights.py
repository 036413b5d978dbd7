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
from engine.models.layers.packed_formats import FORMATS, PackedFormat, saved_format, unpacked
from engine.models.layers.quantization import QuantizedLinear
from engine.models.source import ModelSource
from engine.models.weights import FileNames, assign, mapped_tensors, part_of_rank, read, upload_to

logger = logging.getLogger(__name__)

_PACKED = (torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn)
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
    stored, modules = dict(mapped_tensors(source)), dict(module.named_modules())
    parameters: dict[str, Tensor] = module.state_dict(keep_vars=True)
    layers: dict[str, tuple[str, PackedFormat]] = {}
    kinds = {kind for form in FORMATS[saved] for kind in form[:3]} - {"", "weight"}
    for key, tensor in stored.items():
        layer, _, kind = key.rpartition(".")
        form = next((one for one in FORMATS[saved] if _is_stored(stored, layer, one)), None)
        is_part = form is not None and kind in (*form[:4], "weight_shape", "bias")
        target = f"{layer}.weight" if is_part else key
        name = names.parameter(target)
        if is_part and form is not None and name in parameters:
            layers[key] = layer, form
        is_unknown = not is_part and (kind in kinds or tensor.dtype in _PACKED) and name.rpartition(".")[0] in modules
        if is_unknown or (name in parameters and not names.part(target, parameters[name]).numel()):
            if world_size > 1 or saved in ("awq", "gptq"):
                raise ModelError(f"{source.path}: {key} is of no layout of {saved} that is served")
            return None
    num_parts, pending = Counter(layers.values()), dict[str, dict[str, Tensor]]()
    floats: dict[str, Tensor] = {}
    dtypes = {key: stored[key].dtype for key in layers}
    for key, _, window in read(source, dtypes, device, lambda *_: (), upload_to(device)):
        (layer, form), kind = layers[key], key.rpartition(".")[2]
        parts = pending.setdefault(layer, {})
        parts[kind] = window if kind == "weight_shape" else window.to(device)
        if len(parts) < num_parts[layer, form]:
            continue
        whole = unpacked(f"{source.path}: {layer}", form, pending.pop(layer), settings)
        path = (name := names.parameter(f"{layer}.weight")).removesuffix(".weight")
        part, linear = names.part(f"{layer}.weight", parameters[name]), modules.get(path)
        is_packed = isinstance(whole, QuantizedLinear)
        shape = (whole.out_features, whole.in_features) if is_packed else whole.shape
        if part_of_rank(torch.empty(shape, device="meta"), part, rank, world_size).shape != part.shape:
            raise ModelError(f"{source.path}: {layer} has the shape {[*shape]}, not {[*part.shape]}")
        bias, head = getattr(linear, "bias", None), module.get_output_embeddings()  # type: ignore[operator]
        has_place = isinstance(linear, nn.Linear) and linear is not head and (bias is None or "bias" in parts)
        if is_packed and has_place:
            tensors = (whole.values, whole.scales, None if bias is None else parts["bias"].to(dtype), whole.zeros)
            own = [None if one is None else _own(layer, one, part, whole, rank, world_size) for one in tensors]
            module.set_submodule(path, make(linear, *own))
            continue
        if name not in floats:
            tied = [other for other, tensor in parameters.items() if tensor is parameters[name]]
            floats |= dict.fromkeys(tied, torch.empty_like(parameters[name], device=device))
            assign(module, tied, floats[name])
        weight = whole.weight_as(torch.float32) if is_packed else whole
        names.part(f"{layer}.weight", floats[name]).copy_(part_of_rank(weight, part, rank, world_size))
    if floats:
        message = "%s: no product of ours reads %d of the packed weights, which become floats: %s"
        logger.info(message, source.path, len(floats), ", ".join(sorted(floats)[:3]))
    return set(floats)


def _is_stored(stored: dict[str, Tensor], layer: str, form: PackedFormat) -> bool:
    weight = stored.get(f"{layer}.{form.weight}")
    is_packed = weight is not None and weight.dtype in _PACKED and weight.dtype != torch.uint8
    return is_packed and f"{layer}.{form.scales}" in stored


def _own(layer: str, tensor: Tensor, part: Tensor, whole: QuantizedLinear, rank: int, world_size: int) -> Tensor:
    """Return a rank's part of a whole layer's tensor, [out] or [out, any number that belongs to the inputs]."""
    if tensor.dim() == 1:
        return part_of_rank(tensor, part[:, 0], rank, world_size)
    columns, rest = divmod(tensor.shape[1] * part.shape[1], whole.in_features)
    if rest and tensor.shape[1] > 1:
        group = whole.in_features // tensor.shape[1]
        raise ModelError(f"{layer} has {part.shape[1]} inputs on a rank, not a multiple of its groups of {group}")
    return part_of_rank(tensor, part.new_empty(len(part), columns or 1), rank, world_size).contiguous()
