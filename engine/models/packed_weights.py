"""Packed weights: which saved formats are served, and how a checkpoint's quantised layers replace a model's.

Layers that no product of ours reads become floats: output heads, embeddings, experts, and layers with irregular groups.
`weights.fill` reads the tensors that a checkpoint leaves as floats.
"""

import importlib.util
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GgufConfig, PreTrainedConfig, TorchAoConfig

from engine.errors import ModelError
from engine.models.layers.packed_formats import FORMATS, PackedFormat, unpacked
from engine.models.layers.quantization import QuantizedLinear, torchao_settings
from engine.models.source import ModelSource
from engine.models.weights import FileNames, assign, mapped_tensors, read, upload_to

logger = logging.getLogger(__name__)

PACKED = (torch.uint8, torch.int32, torch.int8, torch.float8_e4m3fn)
"""Number formats of weights that are saved quantised."""
_SETTINGS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "awq": {"bits": [4], "version": ["gemm", "GEMM"], "format": ["gemm"]},
    "gptq": {"bits": [4, 8], "checkpoint_format": ["gptq", "gptq_v2"], "format": ["gptq", "gptq_v2"]},
    "compressed-tensors": {"transform_config": [{}]},
}
"""Settings of which only these values are served; other values change how tensors are stored."""
_OTHERS = {"gguf": ["gguf", "accelerate"], "mxfp4": [], "torchao": ["torchao"]}
"""Other formats that are served, and the packages that load them on a CPU."""


def check_quantization(source: ModelSource) -> None:
    """Raise ModelError, naming the missing requirement, if the quantisation cannot be served."""
    config, saved, name = source.config, source.saved_format, source.config.quantization
    if saved is not None and name != "none":
        raise ModelError(f"{config.path} is already quantised, as {saved}; it cannot be quantised to {name}")
    if saved is None and name == "none":
        return
    if saved is not None and saved not in {*FORMATS, *_OTHERS}:
        raise ModelError(
            f"{config.path} is quantised as {saved}, which is not served; use a model that is saved as "
            f"{', '.join(sorted({*FORMATS, *_OTHERS}))}, or the unquantised one with quantization int8, int4 or fp8"
        )
    for field, served in _SETTINGS.get(saved or "", {}).items():
        if (value := source.configuration.quantization_config.get(field)) is not None and value not in served:
            values = ", ".join(str(value or "none") for value in served)
            raise ModelError(f"{config.path} is quantised as {saved} with {field} {value!r}; served: {values}")
    packages = ["torchao"] if saved is None else _OTHERS.get(saved, [])
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ModelError(
            f"{config.path}: {saved or name} needs the package {' and '.join(missing)}, which is not installed; "
            "`pip install 'paceline[quantization]'` installs it"
        )


def loading_arguments(source: ModelSource, model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return transformers' arguments for loading a quantised model; may change `model_config`."""
    if source.config.quantization != "none":
        return {"quantization_config": TorchAoConfig(torchao_settings(source.config.quantization))}
    if source.saved_format == "gguf":
        file = model_config.__dict__.pop("quantization_config")["gguf_file"]
        return {"gguf_file": file, "quantization_config": GgufConfig(dequantize=True)}
    if source.saved_format in FORMATS:
        model_config.quantization_config["dequantize"] = True
    return {}


def load_packed(
    source: ModelSource, module: nn.Module, names: FileNames, dtype: torch.dtype, device: torch.device
) -> set[str] | None:
    """Replace the packed layers of a model on the meta device; return the names of weights that became floats.

    Returns None if transformers must load the format instead. With a meta `device`, layers have shapes only. Raises
    ModelError if transformers cannot load it either, or a layer does not fit the model.
    """
    saved, settings = str(source.saved_format), source.configuration.quantization_config
    stored, modules = dict(mapped_tensors(source)), dict(module.named_modules())
    parameters: dict[str, Tensor] = module.state_dict(keep_vars=True)
    layers: dict[str, tuple[str, PackedFormat]] = {}
    kinds = {kind for form in FORMATS[saved] for kind in form[:3]} - {"", "weight"}
    for key, tensor in stored.items():
        layer, _, kind = key.rpartition(".")
        form = next((candidate for candidate in FORMATS[saved] if _is_stored(stored, layer, candidate)), None)
        is_part = form is not None and kind in (*form[:4], "weight_shape", "bias")
        target = f"{layer}.weight" if is_part else key
        name = names.parameter(target)
        if is_part and form is not None and name in parameters:
            layers[key] = layer, form
        is_unknown = not is_part and (kind in kinds or tensor.dtype in PACKED) and name.rpartition(".")[0] in modules
        if is_unknown or (name in parameters and not names.part(target, parameters[name]).numel()):
            if saved in ("awq", "gptq"):
                raise ModelError(f"{source.path}: {key} is of no layout of {saved} that is served")
            return None
    output = module.get_output_embeddings()  # type: ignore[operator]
    num_parts, pending = Counter(layers.values()), dict[str, dict[str, Tensor]]()
    floats: dict[str, Tensor] = {}
    dtypes = {key: stored[key].dtype for key in layers}
    for key, _, window in read(source, dtypes, device, lambda _, whole: whole, upload_to(device)):
        (layer, form), kind = layers[key], key.rpartition(".")[2]
        parts = pending.setdefault(layer, {})
        parts[kind] = window if kind == "weight_shape" else window.to(device)
        if len(parts) < num_parts[layer, form]:
            continue
        whole = unpacked(f"{source.path}: {layer}", form, pending.pop(layer), settings)
        path = (name := names.parameter(f"{layer}.weight")).removesuffix(".weight")
        part, linear = names.part(f"{layer}.weight", parameters[name]), modules.get(path)
        if isinstance(whole, QuantizedLinear):
            if isinstance(linear, nn.Linear) and linear is not output and (linear.bias is None or "bias" in parts):
                _check_shape(f"{source.path}: {layer}", (whole.out_features, whole.in_features), part)
                bias = None
                if linear.bias is not None:
                    bias = parts["bias"].to(dtype)
                    _check_shape(f"{source.path}: {layer}.bias", bias.shape, linear.bias)
                module.set_submodule(path, QuantizedLinear(whole.values, whole.scales, bias, whole.zeros))
                continue
            whole = whole.weight_as(torch.float32)
        _check_shape(f"{source.path}: {layer}", whole.shape, part)
        if name not in floats:
            tied = [tied_name for tied_name, tensor in parameters.items() if tensor is parameters[name]]
            floats |= dict.fromkeys(tied, torch.empty_like(parameters[name], device=device))
            assign(module, tied, floats[name])
        names.part(f"{layer}.weight", floats[name]).copy_(whole)
    if floats:
        message = "%s: no product of ours reads %d of the packed weights, which become floats: %s"
        logger.info(message, source.path, len(floats), ", ".join(sorted(floats)[:3]))
    return set(floats)


def _is_stored(stored: dict[str, Tensor], layer: str, form: PackedFormat) -> bool:
    weight = stored.get(f"{layer}.{form.weight}")
    return weight is not None and weight.dtype in PACKED[1:] and f"{layer}.{form.scales}" in stored


def _check_shape(name: str, shape: Sequence[int], expected: Tensor) -> None:
    if tuple(shape) != tuple(expected.shape):
        raise ModelError(f"{name} is {[*shape]}, and its config.json gives {[*expected.shape]}; download both again")
