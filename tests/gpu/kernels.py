"""Kernels on the GPU: their error against float64, what their bits depend on, and their speed; noise bit by bit."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from engine.execution.attention import Group, additive_mask, attend_to_gathered
from engine.execution.batch import ForwardRow, build
from engine.execution.cuda import linear
from engine.execution.cuda.kernels import grouped_product, product
from engine.execution.cuda.kernels import triton_attention as paged_attention
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import AttentionParams, KVShape
from engine.sampling import noise
from tests.gpu.passes import BLOCK_SIZE, median_seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PLAIN = AttentionParams()
PRODUCTS = {
    "qkv of 8B": (6144, 4096),
    "o_proj of 8B": (4096, 4096),
    "gate and up of 8B": (28672, 4096),
    "down_proj of 8B": (4096, 14336),
    "head of 8B": (128256, 4096),
    "down_proj of 1B": (2048, 8192),
}
"""Sizes of the results and of what they are sums over."""
FORMS: dict[str, tuple[list[int] | None, AttentionParams]] = {
    "chain": (None, PLAIN),
    "tree": ([-1, -1, 0, 2], PLAIN),
    "window": (None, AttentionParams(4096)),
}
"""The parents of a draft of four tokens, and the attention of its layer."""
VOCAB = 131_072


def kernels(device: str, *, dry: bool) -> Iterator[dict[str, Any]]:
    place = torch.device(device)
    if device == "cuda":
        linear.sum_in_order()
    if dry:
        with patch.multiple(sys.modules[__name__], HEADS=4, KV_HEADS=1, HEAD_DIM=16):
            yield from errors(place, context=100)
            yield bits(place, context=100)
            yield experts(place, count=40, size=64)
    else:
        for context in (900, 8_193, 131_072):
            yield from errors(place, context=context)
        yield bits(place, context=2100)
        yield experts(place, count=4096, size=2048)
        for name, shape in PRODUCTS.items():
            yield products(place, name, shape)


def dtype_of(device: torch.device | str) -> torch.dtype:
    """Return bfloat16, but float16 on a CPU: interpreted, `tl.full` gives other numbers in bfloat16."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float16


def errors(device: torch.device, *, context: int) -> Iterator[dict[str, Any]]:
    """Compare each form with torch in float64, beside torch's own attention in the same format."""
    width = -(-(context + 5) // BLOCK_SIZE)
    kv = random_cache(1 + width, device)
    query = torch.randn(HEADS, 5, HEAD_DIM, dtype=dtype_of(device), device=device)
    for name, (parents, params) in FORMS.items():
        (group,) = build([ForwardRow([1] * 5, context, range(1, 1 + width), 5, parents)], kv).paged.groups
        right, torchs = (by_torch(group, query, kv, dtype, params) for dtype in (torch.float64, query.dtype))
        yield {
            "cell": f"{name} of 5 tokens at {context}",
            "error": float((attend(group, query, kv, params).double() - right).abs().max()),
            "error_of_torch": float((torchs.double() - right).abs().max()),
        }


def bits(device: torch.device, *, context: int) -> dict[str, Any]:
    """Count how many numbers differ between ways to compute the attention of 5 tokens."""
    kv = random_cache(300, device)
    table = [*range(1, 140)]
    (group,) = build([ForwardRow([1] * 5, context, table, 5)], kv).paged.groups
    query = torch.randn(HEADS, 64, HEAD_DIM, dtype=dtype_of(device), device=device)
    together = attend(group, query[:, :5], kv)
    alone = [
        attend(build([ForwardRow([1], context + i, table, 1)], kv).paged.groups[0], query[:, i : i + 1], kv)
        for i in range(5)
    ]
    rows = [ForwardRow([1] * 16, 3, [150], 16), ForwardRow([1] * 5, context, table, 5)]
    (beside,) = build(rows, kv).paged.groups
    wide = query[:, :32].clone()
    wide[:, 16:21] = query[:, :5]
    (prompt,) = build([ForwardRow([1] * 64, context, table, 1)], kv).paged.groups
    return {
        "alone": different(torch.cat(alone), together),
        "beside_another_row": different(attend(beside, wide, kv)[16:21], together),
        "in_a_prompt": different(attend(prompt, query, kv)[:5], together),
    }


def experts(device: torch.device, *, count: int, size: int) -> dict[str, Any]:
    """Count how many numbers of a grouped product differ between few rows and many, which have another tile."""
    weight = torch.randn(2, 128, size, dtype=dtype_of(device), device=device)
    rows = torch.randn(count, size, dtype=dtype_of(device), device=device)
    index = torch.arange(count, device=device).unsqueeze(-1) % 2

    def multiply(few: int) -> torch.Tensor:
        order, ends = torch.ops.paceline.sort_by_expert(index[:few], 2)
        return grouped_product.multiply(rows[:few], order, ends, weight, None, torch.float32)

    return {"experts_different": different(multiply(5), multiply(count)[:5])}


def products(device: torch.device, name: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Time the kernel and cuBLAS, and compare their bits with those of 5 rows."""
    copies = max(2, int(3e8 / (2 * shape[0] * shape[1])) + 1)
    weights = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    rows = torch.randn(1024, shape[1], dtype=torch.bfloat16, device=device)
    first = product.multiply(rows[:5], weights[0], None)
    reading: dict[str, Any] = {"product": name}
    for count in (1, 5, 40, 160, 1024):
        few = rows[:count]
        reading[f"us_{count}"] = [
            round(graph_seconds(partial(multiply, few), weights) * 1e6, 1)
            for multiply in (lambda x, w: product.multiply(x, w, None), F.linear)
        ]
        ours, theirs = product.multiply(few, weights[0], None)[:5], F.linear(few, weights[0])[:5]
        reading[f"different_{count}"] = [different(ours, first[: len(ours)]), different(theirs, first[: len(theirs)])]
    return reading


def graph_seconds(launch: Callable[[Any], object], operands: Sequence[Any]) -> float:
    """Return the mean time of a kernel in a graph of one launch for each operand."""
    launch(operands[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        for operand in operands:
            launch(operand)
    return median_seconds(graph.replay, "cuda") / len(operands)


def noise_bits(device: str, *, num_rows: int) -> dict[str, Any]:
    """Compare rows of noise with the CPU's: uniform numbers bit by bit, Gumbel noise by its largest difference."""
    cpu, other = torch.device("cpu"), torch.device(device)
    token_ids = torch.arange(VOCAB, dtype=torch.int32)
    num_different, farthest, num_draws_moved = 0, 0.0, 0
    started = time.perf_counter()
    for first in range(0, num_rows, 64):
        keys = noise.keys(range(first, first + 64), range(64), noise.TARGET_STREAM, cpu)
        expected = noise.uniform(keys, token_ids)
        found = noise.uniform(keys.to(other), token_ids.to(other)).cpu()
        num_different += int((expected != found).sum())
        gumbel = noise.plain_gumbel(keys, token_ids)
        gumbel_found = noise.plain_gumbel(keys.to(other), token_ids.to(other)).cpu()
        farthest = max(farthest, float((gumbel - gumbel_found).abs().max()))
        num_draws_moved += int((gumbel.argmax(-1) != gumbel_found.argmax(-1)).sum())
    return {
        "numbers": num_rows * VOCAB,
        "uniform_different": num_different,
        "largest_gumbel_difference": farthest,
        "argmax_different": num_draws_moved,
        "seconds": round(time.perf_counter() - started, 1),
    }


def attend(group: Group, query: torch.Tensor, kv: KVTensors, params: AttentionParams = PLAIN) -> torch.Tensor:
    output = query.new_empty(query.shape[1], HEADS, HEAD_DIM)
    paged_attention.attend(group, query, kv.keys[0], kv.values[0], output, params)
    return output


def by_torch(
    group: Group, query: torch.Tensor, kv: KVTensors, dtype: torch.dtype, params: AttentionParams
) -> torch.Tensor:
    """Return the attention to a group by torch, computed in a number format."""
    keys, values = (cache[0][group.blocks].to(dtype) for cache in (kv.keys, kv.values))
    context, limits = group.blocks.shape[1] * BLOCK_SIZE, group.limits_of(params)
    mask = additive_mask(context, group.positions, limits, group.extra, params.window, dtype, params.first)
    mask = mask.repeat(1, 1, len(query) // kv.keys[0].shape[2], 1)
    return attend_to_gathered(group.rows, group.length, query.to(dtype), keys, values, mask, params)


def random_cache(num_blocks: int, device: torch.device) -> KVTensors:
    like = torch.empty(0, dtype=dtype_of(device), device=device)
    kv = KVTensors(KVShape(1, KV_HEADS, HEAD_DIM, HEAD_DIM), num_blocks, BLOCK_SIZE, like)
    kv.keys[0].normal_()
    kv.values[0].normal_()
    return kv


def different(tensor: torch.Tensor, other: torch.Tensor) -> int:
    return int((tensor != other).sum())
