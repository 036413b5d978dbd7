"""Writing keys and values to their slots of a cache, in its number format."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.execution.kv_tensors import as_bytes


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write keys and values [kv_heads, tokens, key_dim or value_dim] to their slots [tokens] of one layer's cache."""
    kv_heads, tokens, key_dim = key.shape
    value_dim = value.shape[-1]
    _write_kernel[(tokens,)](
        key, value, as_bytes(keys), as_bytes(values), slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, HEADS_PAD=triton.next_power_of_2(kv_heads),
        KEY_DIM=key_dim, KEY_PAD=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim, VALUE_PAD=triton.next_power_of_2(value_dim), IS_FP8=keys.dtype == torch.float8_e4m3fn,
    )  # fmt: skip


@triton.jit
def _narrowed(numbers):
    """Return the bits of the nearest float8_e4m3fn; numbers above 448 become 448."""
    exact = numbers.to(tl.float32)
    size = tl.minimum(tl.abs(exact), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents are lower by 120
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # steps of 2^-9, as beside 2^14
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 128
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def _write_one(
    new, cache, token, slot, head_stride, token_stride,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, PAD)[None, :]
    is_entry = (head < KV_HEADS) & (column < DIM)
    numbers = tl.load(new + head * head_stride + token * token_stride + column, is_entry)
    numbers = _narrowed(numbers) if IS_FP8 else numbers
    tl.store(cache + (slot * KV_HEADS + head) * DIM + column, numbers, is_entry)


@triton.jit
def _write_kernel(
    key, value, keys, values, slots, key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    _write_one(key, keys, token, slot, key_head_stride, key_token_stride, KV_HEADS, HEADS_PAD, KEY_DIM, KEY_PAD, IS_FP8)
    _write_one(
        value, values, token, slot, value_head_stride, value_token_stride,
        KV_HEADS, HEADS_PAD, VALUE_DIM, VALUE_PAD, IS_FP8,
    )  # fmt: skip
