"""The noise of a whole vocabulary on CUDA: the hash as one Triton kernel, then torch's logarithms."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_TILE = 1024


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return `noise.plain_gumbel` [n, vocab] of keys [n, 2] and token ids [vocab], both int32."""
    return uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the same bits as `engine.sampling.noise.uniform`."""
    vocab = len(token_ids)
    output = torch.empty((len(keys), vocab), dtype=torch.float32, device=keys.device)
    if len(keys):
        grid = (len(keys), triton.cdiv(vocab, _TILE))
        _uniform_kernel[grid](keys, token_ids, output, *keys.stride(), vocab, TILE=_TILE, enable_fp_fusion=False)
    return output


@triton.jit
def _uniform_kernel(keys, token_ids, output, key_stride, word_stride, vocab, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < vocab
    low = tl.load(keys + row * key_stride).to(tl.uint32, bitcast=True)
    high = tl.load(keys + row * key_stride + word_stride).to(tl.uint32, bitcast=True)
    x = tl.load(token_ids + column, is_column, 0).to(tl.uint32, bitcast=True) ^ low
    x ^= x >> 16
    x *= tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= high
    x ^= x >> 13
    x *= tl.full((), 0xC2B2AE35, tl.uint32)
    x ^= x >> 16
    # A product with a power of two and a sum with a half round once each, so no order of them rounds otherwise.
    numbers = ((x >> 1).to(tl.float32) + 0.5) * (2.0**-31)
    tl.store(output + row * vocab + column, tl.minimum(numbers, 1 - 2.0**-24), is_column)
