"""Drawing tokens on CUDA: the best score of each tile of the vocabulary, then the best of all tiles.

All kernels share one noise function, so that a token does not depend on the kernel that draws it. The noise rounds in
one way: the hash is of integers, divisions are exact to the last bit, and nothing is fused.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_TILE = 1024


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise [n, vocab] of int32 keys [n, 2] and token ids [vocab]: `noise.plain_gumbel` up to rounding."""
    vocab = len(token_ids)
    output = torch.empty((len(keys), vocab), dtype=torch.float32, device=keys.device)
    if len(keys):
        grid = (len(keys), triton.cdiv(vocab, _TILE))
        _gumbel_kernel[grid](keys, token_ids, output, *keys.stride(), vocab, TILE=_TILE, enable_fp_fusion=False)
    return output


def draw(logits: Tensor, temperatures: Tensor, keys: Tensor, is_drawn: Tensor) -> Tensor:
    """Return each row's token [n] int64, the argmax of its scores (the lowest id of equals).

    Scores are logits over temperature plus noise.

    Args:
        logits: [n, vocab] float32; a row of NaN draws token 0.
        temperatures: [n] float32; keys: [n, 2] int32.
        is_drawn: [n] int32; rows of 0 are greedy, without temperature and noise.
    """
    count, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, _TILE)
    best = torch.empty((count, num_tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((count, num_tiles), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        _tile_kernel[count, num_tiles](
            logits, temperatures, keys, is_drawn, best, ids, logits.stride(0), *keys.stride(), vocab,
            TILE=_TILE, enable_fp_fusion=False,
        )  # fmt: skip
        _best_kernel[(count,)](best, ids, tokens, num_tiles, vocab, TILES=triton.next_power_of_2(num_tiles))
    return tokens


@triton.jit
def _gumbel(key, word_stride, token_ids):
    """Return the noise of token ids (uint32) for a key in memory; see `noise.uniform`."""
    low = tl.load(key).to(tl.uint32, bitcast=True)
    high = tl.load(key + word_stride).to(tl.uint32, bitcast=True)
    x = token_ids ^ low
    x ^= x >> 16
    x *= tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= high
    x ^= x >> 13
    x *= tl.full((), 0xC2B2AE35, tl.uint32)
    x ^= x >> 16
    # Multiplying by a power of two is exact, so this rounds alike in any order.
    uniform = tl.minimum(((x >> 1).to(tl.float32) + 0.5) * (2.0**-31), 1 - 2.0**-24)
    # log1p(-uniform) by Kahan: the rounding of 1 - uniform cancels in the quotient.
    rest = 1.0 - uniform
    is_tiny = rest == 1.0
    exponential = tl.log(rest) * tl.div_rn(uniform, tl.where(is_tiny, 1.0, rest - 1.0))
    return -tl.log(tl.where(is_tiny, uniform, exponential))


@triton.jit
def _gumbel_kernel(keys, token_ids, output, key_stride, word_stride, vocab, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < vocab
    tokens = tl.load(token_ids + column, is_column, 0).to(tl.uint32, bitcast=True)
    tl.store(output + row * vocab + column, _gumbel(keys + row * key_stride, word_stride, tokens), is_column)


@triton.jit
def _tile_kernel(
    logits, temperatures, keys, is_drawn, best, ids, row_stride, key_stride, word_stride, vocab,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    is_column = column < vocab
    scores = tl.load(logits + row * row_stride + column, is_column, float("-inf"))
    if tl.load(is_drawn + row) != 0:
        noise = _gumbel(keys + row * key_stride, word_stride, column.to(tl.uint32, bitcast=True))
        scores = tl.div_rn(scores, tl.load(temperatures + row)) + noise
    highest = tl.max(scores, 0)
    token = tl.min(tl.where(is_column & (scores == highest), column, vocab), 0)
    tl.store(best + row * tl.num_programs(1) + tile, highest)
    tl.store(ids + row * tl.num_programs(1) + tile, token)


@triton.jit
def _best_kernel(best, ids, tokens, num_tiles, vocab, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    tile_scores = tl.load(best + row * num_tiles + tile, is_tile, float("-inf"))
    highest = tl.max(tile_scores, 0)
    candidates = tl.load(ids + row * num_tiles + tile, is_tile, vocab)
    token = tl.min(tl.where(tile_scores == highest, candidates, vocab), 0)
    tl.store(tokens + row, tl.where(token < vocab, token, 0).to(tl.int64))
