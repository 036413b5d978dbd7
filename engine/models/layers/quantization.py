"""Quantised weights: rounded as the model loads, or saved quantised.

torchao rounds layer by layer as transformers loads, so the whole model is never in memory as floats; the output head
and embeddings are not rounded. Saved 4- and 8-bit weights with a scale per output or group of inputs stay quantised, as
do gpt-oss' experts. Other saved formats become floats at load. Activations are never quantised.
"""

import fnmatch
import logging
import threading
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.config import Quantization
from engine.errors import ModelError

logger = logging.getLogger(__name__)

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
GROUP_SIZE = 32
"""Inputs that share a scale in int4."""
_MAKING = threading.RLock()
"""Held while transformers changes the process's default number format, for ranks that are threads."""
_NUM_BITS = {"int8": 8, "int4": 4, "fp8": 8}
_VALUE_DTYPES = (torch.int8, torch.float8_e4m3fn)
_INPUT_SETTINGS = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale", "activation_quantization")


def check_groups(path: str, module: nn.Module) -> None:
    """Raise ModelError if a layer's inputs cannot be rounded in groups."""
    for layer_name, layer in linear_layers(module).items():
        if layer.in_features % GROUP_SIZE:
            raise ModelError(
                f"{path}: int4 needs layers whose number of inputs is a multiple of {GROUP_SIZE}, but "
                f"{layer_name} has {layer.in_features}"
            )


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that are quantised, by name: all but the output head."""
    output = module.get_output_embeddings()  # type: ignore[operator]
    layers = module.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, nn.Linear) and layer is not output}


def on_meta(model_config: PreTrainedConfig, made_by: Any = AutoModelForCausalLM, **arguments: Any) -> nn.Module:
    """Return the unquantised model on the meta device; raise ValueError if its position tables are beyond memory."""
    with _MAKING, torch.device("meta"):
        module: Any = made_by.from_config(model_config, **arguments)
    if (size := sum(buffer.numel() for buffer in module.buffers())) > 2**30:  # which no file bounds
        raise ValueError(f"its tables of positions would have {size:,} numbers")
    for pattern, plan_dtype in module._get_dtype_plan(arguments.get("dtype")).items():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if fnmatch.fnmatchcase(name, f"*{pattern}*"):
                tensor.data = tensor.data.to(plan_dtype)
    return module  # type: ignore[no-any-return]


def layer_bytes(quantization: Quantization, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a quantised layer's weights and scales, with float32 scales."""
    groups = num_inputs // GROUP_SIZE if quantization == "int4" else 1
    return num_outputs * (num_inputs * _NUM_BITS[quantization] // 8 + 4 * groups)


def torchao_settings(quantization: Quantization) -> Any:
    """Return torchao's name for a quantisation."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if quantization in ("int8", "fp8"):
        kind = Int8WeightOnlyConfig if quantization == "int8" else Float8WeightOnlyConfig
        # Otherwise torchao would also change the precision of every float32 product in this process.
        return kind(set_inductor_config=False)
    return IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(GROUP_SIZE))


class QuantizedLinear(nn.Module):
    """A linear layer with the weights `(values - zeros) * scales`, in plain tensors that can be fused and compiled.

    This forward converts weights to floats in every pass, as torchao does: it saves memory, not time.
    """

    values: Tensor  # [out, in] int8 or float8_e4m3fn; 4 bits: [out, in / 2] uint8 by `pack_nibbles`
    scales: Tensor  # [out, groups], in the model's number format or float32
    bias: Tensor | None  # [out]
    zeros: Tensor | None  # [out, groups] int8; None if all are 0

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("zeros", zeros, persistent=False)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.out_features = len(values)
        self.in_features = values.shape[1] * (2 if values.dtype == torch.uint8 else 1)

    @classmethod
    def concatenated(cls, layers: Sequence["QuantizedLinear"]) -> Self:
        """Return one layer with the outputs of several layers that have the same inputs and format."""
        names = ("values", "scales", "bias", "zeros")
        tensors = ([tensor for layer in layers if (tensor := getattr(layer, name)) is not None] for name in names)
        return cls(*(torch.cat(parts) if parts else None for parts in tensors))  # type: ignore[arg-type]

    @property
    def num_bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def integers(self) -> Tensor:
        return unpack_nibbles(self.values) if self.values.dtype == torch.uint8 else self.values

    def forward(self, x: Tensor) -> Tensor:
        if self.scales.shape[1] == 1 and self.zeros is None:
            product = F.linear(x, self.integers.to(x.dtype)) * self.scales.to(x.dtype).flatten()
        else:
            product = F.linear(x, self.weight_as(x.dtype))
        return product if self.bias is None else product + self.bias

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return the [out, in] weight in a number format, to which integers and scales are rounded first."""
        integers = self.integers.to(dtype).view(self.out_features, self.scales.shape[1], -1)
        if self.zeros is not None:
            integers = integers - self.zeros.to(dtype).unsqueeze(-1)
        return (integers * self.scales.to(dtype).unsqueeze(-1)).flatten(1)


def pack_nibbles(integers: Tensor) -> Tensor:
    """Pack [out, in] int8 numbers from -8 to 7 to [out, in / 2] uint8; the first of two inputs is the lower half."""
    halves = integers.view(torch.uint8)
    return halves[:, ::2] & 15 | halves[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the [out, in] int8 numbers that `pack_nibbles` packed."""
    return torch.stack([(packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4], -1).flatten(1)


def convert_torchao(name: str, module: nn.Module) -> None:
    """Replace torchao's linear layers by `QuantizedLinear`, or by floats; raise ModelError if inputs are quantised."""
    from torchao.utils import TorchAOBaseTensor

    for parent in list(module.modules()):
        for child_name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if not isinstance(weight, TorchAOBaseTensor):
                continue
            if any(getattr(weight, name, None) is not None for name in _INPUT_SETTINGS):
                raise ModelError(f"{name}: torchao's layers that quantise their inputs are not served ({child_name})")
            if isinstance(child, nn.Linear) and (layer := _quantized_linear(weight, child.bias)) is not None:
                setattr(parent, child_name, layer)
            else:
                logger.info("%s: no product of ours reads %s, which becomes floats", name, child_name)
                child.weight = nn.Parameter(weight.dequantize(), requires_grad=False)


def _quantized_linear(weight: Any, bias: Tensor | None) -> QuantizedLinear | None:
    """Return a layer with torchao's numbers; None if a scale is for a block of several outputs."""
    integers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(integers, Tensor) or not isinstance(scales, Tensor) or integers.dtype not in _VALUE_DTYPES:
        return None
    if integers.shape != weight.shape or scales.shape[:-1] != integers.shape[:-1]:
        return None
    zeros = getattr(weight, "zero_point", None)
    if zeros is not None and not zeros.any():
        zeros = None
    if zeros is not None and (zeros.dtype != torch.int8 or zeros.shape != scales.shape):
        return None
    has_nibbles = getattr(weight, "target_dtype", None) == INT4 and integers.shape[1] % 2 == 0
    return QuantizedLinear(pack_nibbles(integers) if has_nibbles else integers, scales, bias, zeros)
