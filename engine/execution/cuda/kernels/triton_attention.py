"""Paged attention for CUDA: Triton kernels that read keys and values in their blocks.

A row's context is cut into chunks of fixed length, and chunk c belongs to part c % NUM_PARTS. Parts are computed
separately and merged in order. This is flash-decoding (Dao et al., 2023) with a split that does not depend on the
batch, so every bit of a token's result depends only on its query and its context.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.execution.attention import Group
from engine.execution.cuda.kernels.product import widened
from engine.execution.kv_tensors import as_bytes
from engine.models.layers.layer_attention import AttentionParams

CHUNK = 256
"""Consecutive places of a part."""
TILE = 128
"""Most places that are loaded at once; tiles of large keys or values are shorter, to fit into shared memory."""
NUM_PARTS = 32
"""Parts of a context; in short rows, each part has its own program."""
_SIZES = ["length", "num_parts", "blocks_row_stride", "blocks_stride"]
"""Arguments that do not specialise a kernel, because variants would be compiled while requests wait."""
MAX_SPLIT_LENGTH = 32
"""Longer rows have enough programs without splitting their context."""
MAX_DIM = 256
"""Larger keys or values fit into no GPU's registers."""
_LOG2_E = 1.4426950408889634


def attend(group: Group, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, params: AttentionParams) -> None:
    """Attend to a group's blocks.

    Args:
        query: [heads, rows * length, key_dim].
        keys, values: [num_blocks, block_size, kv_heads, key_dim or value_dim], one layer's cache.
        output: [rows * length, heads, value_dim], filled by this call.
    """
    heads, _, key_dim = query.shape
    value_dim = values.shape[-1]
    _, block_size, kv_heads, _ = keys.shape
    num_extra = 0 if group.extra is None else group.extra.shape[-1]
    sizes = (heads, kv_heads, key_dim, value_dim, block_size, group.length, num_extra)
    constants, common = attention_constants(*sizes, params, query.itemsize, is_fp8=keys.dtype == torch.float8_e4m3fn)
    is_split = constants["IS_SPLIT"]
    num_parts = min(triton.cdiv(group.blocks.shape[1] * block_size, CHUNK), NUM_PARTS)
    tokens, limits = group.rows * group.length, group.limits_of(params).contiguous()
    partials, stats = output, output
    if is_split:
        partials = torch.empty((tokens, heads, num_parts, value_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((tokens, heads, num_parts, 2), dtype=torch.float32, device=query.device)
    extra = limits if group.extra is None else group.extra
    sinks = output if params.sinks is None else params.sinks
    scale = key_dim**-0.5 if params.scaling is None else params.scaling
    # Scores are in units of log2, for `exp2`.
    cap = 0.0 if params.softcap is None else params.softcap * _LOG2_E
    scale = scale * _LOG2_E if params.softcap is None else scale / params.softcap
    num_tiles = triton.cdiv(group.length, constants["TILE_TOKENS"])
    grid = (group.rows * num_tiles, kv_heads, num_parts if is_split else 1)
    _attend_kernel[grid](
        query, as_bytes(keys), as_bytes(values), output, partials, stats,
        group.blocks, limits, group.positions, extra, sinks,
        scale, cap, group.length, num_parts,
        query.stride(0), query.stride(1), *group.blocks.stride(),
        num_stages=2, num_warps=num_warps(constants), enable_fp_fusion=False, **constants,
    )  # fmt: skip
    if is_split:
        _merge_kernel[(tokens, heads)](
            partials, stats, output, limits, group.positions, extra, sinks, num_parts,
            enable_fp_fusion=False, **common,
        )  # fmt: skip


def attention_constants(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, length: int, num_extra: int,
    params: AttentionParams, item_bytes: int, *, is_fp8: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Return the constants of the kernels that attend to chunks and merge them."""
    key_pad, value_pad, copies = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim), heads // kv_heads
    # Not by length, because tiles of other sizes would round differently.
    tile = min(TILE, (1 << 16) // (max(key_pad, value_pad) * item_bytes**2))
    assert CHUNK % tile == 0, "a tile lies in one chunk"
    most_tokens = max(1, (64 if tile == TILE else 32) // copies)
    tile_tokens = min(triton.next_power_of_2(length), 1 << most_tokens.bit_length() - 1)
    common = {
        "HEADS": heads, "VALUE_DIM": value_dim, "VALUE_PAD": value_pad, "NUM_EXTRA": num_extra,
        "CHUNK": CHUNK, "NUM_PARTS": NUM_PARTS,
        "WINDOW": params.window or 0, "FIRST": params.first, "HAS_SINKS": params.sinks is not None,
    }  # fmt: skip
    return common | {
        "KV_HEADS": kv_heads, "COPIES": copies, "BLOCK_SIZE": block_size, "TILE_TOKENS": tile_tokens,
        "ROWS": max(16, triton.next_power_of_2(tile_tokens * copies)), "TILE": tile,
        "IS_SPLIT": length <= MAX_SPLIT_LENGTH,
        "KEY_DIM": key_dim, "KEY_PAD": key_pad, "HAS_CAP": params.softcap is not None,
        "IS_FP8": is_fp8,
    }, common  # fmt: skip


def num_warps(constants: dict[str, int]) -> int:
    """Return the warps of a program that attends; with fewer, its sums do not fit into registers."""
    return 8 if constants["ROWS"] * constants["VALUE_PAD"] >= 4096 else 4


@triton.jit
def _bounds(
    limits, positions, extra, token, is_token, NUM_EXTRA: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr
):
    limit = tl.load(limits + token, mask=is_token, other=0).to(tl.int32)
    first = tl.zeros_like(limit)
    if WINDOW > 0:
        position = tl.load(positions + token, mask=is_token, other=0).to(tl.int32)
        first = tl.maximum(position - WINDOW + 1, 0)
    if FIRST > 0:
        first = tl.maximum(first, tl.minimum(limit - 1, FIRST))
    end = limit
    for i in tl.static_range(NUM_EXTRA):
        end = tl.maximum(end, tl.load(extra + token * NUM_EXTRA + i, mask=is_token, other=-1).to(tl.int32) + 1)
    return first, limit, end


@triton.jit
def _first_chunk(part, start, NUM_PARTS: tl.constexpr):
    """Return a part's first chunk that is not before chunk `start`."""
    return part + tl.cdiv(tl.maximum(start - part, 0), NUM_PARTS) * NUM_PARTS


@triton.jit
def _merged(best, total, other_best, other_total):
    """Merge two parts of a softmax by explicit multiply-adds, so that every compilation rounds alike."""
    new_best = tl.maximum(best, other_best)
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    kept = tl.exp2(best - shift)
    added = tl.exp2(other_best - shift)
    return new_best, tl.fma(total, kept, other_total * added), kept, added


@triton.jit
def _left_to_sink(best, total, sink):
    """Add a sink's weight to a softmax's total; return the total and the factor of the sums so far."""
    new_best = tl.maximum(best, sink)
    kept = tl.exp2(best - new_best)
    return tl.fma(total, kept, tl.exp2(sink - new_best)), kept


@triton.jit(do_not_specialize=_SIZES)
def _attend_kernel(
    query, keys, values, output, partials, stats, blocks, limits, positions, extra, sinks,
    scale, cap, length, num_parts, query_head_stride, query_token_stride, blocks_row_stride, blocks_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, COPIES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    NUM_EXTRA: tl.constexpr, CHUNK: tl.constexpr, NUM_PARTS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Attend to parts of the context of one tile of tokens and one key/value head.

    COPIES query heads share that head: row i of the product is query head i % COPIES of token i // COPIES.
    """
    num_tiles = tl.cdiv(length, TILE_TOKENS)
    row = tl.program_id(0) // num_tiles
    kv_head = tl.program_id(1)
    lane = tl.arange(0, ROWS)
    token_in_row = tl.program_id(0) % num_tiles * TILE_TOKENS + lane // COPIES
    is_token = (token_in_row < length) & (lane < TILE_TOKENS * COPIES)
    token = row * length + token_in_row
    head = kv_head * COPIES + lane % COPIES
    first, limit, end = _bounds(limits, positions, extra, token, is_token, NUM_EXTRA, WINDOW, FIRST)
    last = tl.max(tl.where(is_token, end, 0), 0)
    start = tl.min(tl.where(is_token, first, last), 0)
    key_column = tl.arange(0, KEY_PAD)
    is_key_column = key_column < KEY_DIM
    column = tl.arange(0, VALUE_PAD)
    is_column = column < VALUE_DIM
    rows = tl.load(
        query + head[:, None] * query_head_stride + token[:, None] * query_token_stride + key_column[None, :],
        mask=is_token[:, None] & is_key_column[None, :], other=0.0,
    )  # fmt: skip
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    num_chunks = tl.cdiv(last, CHUNK)
    for part in range(tl.program_id(2), tl.minimum(num_chunks, NUM_PARTS), tl.num_programs(2)):
        first_chunk = _first_chunk(part, start // CHUNK, NUM_PARTS)
        if first_chunk < num_chunks:
            part_best = tl.full((ROWS,), float("-inf"), tl.float32)
            part_total = tl.zeros((ROWS,), tl.float32)
            part_sums = tl.zeros((ROWS, VALUE_PAD), tl.float32)
            for chunk in range(first_chunk, num_chunks, NUM_PARTS):
                for place_start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, last), TILE):
                    place = place_start + tl.arange(0, TILE)
                    is_place = place < last
                    block = tl.load(blocks + row * blocks_row_stride + place // BLOCK_SIZE * blocks_stride, is_place, 0)
                    entry = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * KV_HEADS + kv_head
                    key_entry = keys + entry[None, :] * KEY_DIM + key_column[:, None]
                    key = tl.load(key_entry, is_place[None, :] & is_key_column[:, None], 0)
                    if IS_FP8:
                        key = widened(key, rows.dtype)
                    scores = tl.dot(rows, key, input_precision="ieee") * scale
                    if HAS_CAP:  # tanh
                        scores = (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0)) * cap
                    is_visible = place[None, :] < limit[:, None]
                    for i in tl.static_range(NUM_EXTRA):
                        node = tl.load(extra + token * NUM_EXTRA + i, mask=is_token, other=-1).to(tl.int32)
                        is_visible = is_visible | (place[None, :] == node[:, None])
                    if WINDOW + FIRST > 0:
                        is_visible = is_visible & (place[None, :] >= first[:, None])
                    scores = tl.where(is_visible, scores, float("-inf"))
                    new_best = tl.maximum(part_best, tl.max(scores, 1))
                    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
                    weights = tl.exp2(scores - shift[:, None])
                    kept = tl.exp2(part_best - shift)
                    value_entry = values + entry[:, None] * VALUE_DIM + column[None, :]
                    value = tl.load(value_entry, is_place[:, None] & is_column[None, :], 0)
                    if IS_FP8:
                        value = widened(value, rows.dtype)
                    # A product with ones sums in order of places; the order of `tl.sum` depends on the tile.
                    ones = tl.full((TILE, 16), 1.0, value.dtype)
                    tile_totals = tl.dot(weights.to(value.dtype), ones, input_precision="ieee")
                    tile_total = tl.max(tile_totals, 1)  # all columns are alike
                    part_total = tl.fma(part_total, kept, tile_total)
                    part_sums = tl.dot(
                        weights.to(value.dtype), value, part_sums * kept[:, None], input_precision="ieee"
                    )
                    part_best = new_best
            if IS_SPLIT:
                entry = (token * HEADS + head) * num_parts + part
                partial = partials + entry.to(tl.int64)[:, None] * VALUE_DIM + column[None, :]
                tl.store(partial, part_sums, is_token[:, None] & is_column[None, :])
                tl.store(stats + entry * 2, part_best, is_token)
                tl.store(stats + entry * 2 + 1, part_total, is_token)
            else:
                best, total, kept, added = _merged(best, total, part_best, part_total)
                sums = tl.fma(sums, tl.broadcast_to(kept[:, None], sums.shape), part_sums * added[:, None])
    if not IS_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_token, other=0.0).to(tl.float32) * 1.4426950408889634
            total, kept = _left_to_sink(best, total, sink)
            sums *= kept[:, None]
        place = (token * HEADS + head).to(tl.int64)[:, None] * VALUE_DIM + column[None, :]
        is_written = is_token[:, None] & is_column[None, :]
        sums /= tl.where(is_token, total, 1.0)[:, None]
        tl.store(output + place, sums.to(output.dtype.element_ty), is_written)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_kernel(
    partials, stats, output, limits, positions, extra, sinks, num_parts,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, NUM_EXTRA: tl.constexpr,
    CHUNK: tl.constexpr, NUM_PARTS: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    first, _, end = _bounds(limits, positions, extra, token, True, NUM_EXTRA, WINDOW, FIRST)
    column = tl.arange(0, VALUE_PAD)
    is_column = column < VALUE_DIM
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((VALUE_PAD,), tl.float32)
    num_chunks = tl.cdiv(end, CHUNK)
    for part in range(tl.minimum(num_chunks, NUM_PARTS)):
        if _first_chunk(part, first // CHUNK, NUM_PARTS) < num_chunks:
            entry = (token * HEADS + head).to(tl.int64) * num_parts + part
            part_sums = tl.load(partials + entry * VALUE_DIM + column, is_column, 0.0)
            best, total, kept, added = _merged(best, total, tl.load(stats + entry * 2), tl.load(stats + entry * 2 + 1))
            sums = tl.fma(sums, tl.broadcast_to(kept, sums.shape), part_sums * added)
    if HAS_SINKS:
        total, kept = _left_to_sink(best, total, tl.load(sinks + head).to(tl.float32) * 1.4426950408889634)
        sums *= kept
    place = (token * HEADS + head).to(tl.int64) * VALUE_DIM + column
    tl.store(output + place, (sums / total).to(output.dtype.element_ty), is_column)
