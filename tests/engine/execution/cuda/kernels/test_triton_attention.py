"""The Triton kernels, interpreted on the CPU, against torch's attention in float64."""

from dataclasses import replace

import pytest
import torch

from engine.execution.batch import ForwardRow, build
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import AttentionParams, KVShape

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.kernels import triton_attention as paged_attention
from tests.gpu.kernels import by_torch

BLOCK_SIZE = 16
SIZES = paged_attention.CHUNK, paged_attention.TILE


def test_a_chunk_is_a_whole_number_of_tiles():
    chunk, tile = SIZES
    assert chunk % tile == 0


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Interpreted kernels are slow; several chunks of several tiles are what counts."""
    monkeypatch.setattr(paged_attention, "CHUNK", 64)
    monkeypatch.setattr(paged_attention, "TILE", 32)


def context(num_blocks, kv_heads, head_dim, value_dim=None, dtype=torch.float32):
    kv = KVTensors(
        KVShape(1, kv_heads, head_dim, value_dim or head_dim), num_blocks, BLOCK_SIZE, torch.empty(0, dtype=dtype)
    )
    generator = torch.Generator().manual_seed(1)
    for cache in (*kv.keys, *kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return kv


def attend(group, query, kv, params=AttentionParams()):  # noqa: B008 - a tuple
    output = torch.full((query.shape[1], query.shape[0], kv.values[0].shape[-1]), 7.0, dtype=query.dtype)
    paged_attention.attend(group, query, kv.keys[0], kv.values[0], output, params)
    return output


ROWS = {
    "a chain": [ForwardRow([1] * 5, 75, [*range(1, 7)], 5)],
    "rows of different lengths": [
        ForwardRow([1] * 5, 17, [1, 2], 5), ForwardRow([1], 150, [*range(3, 13)], 1), ForwardRow([1] * 3, 0, [2], 3),
    ],
    "trees": [
        ForwardRow([1] * 5, 66, [*range(1, 8)], 5, [-1, -1, 0, 1]), ForwardRow([1] * 4, 9, [40], 4, [-1, 0, 0]),
    ],
    "a prompt": [ForwardRow([1] * 40, 65, [*range(1, 9)], 1)],
}  # fmt: skip


PARAMS = {
    "plain": AttentionParams(),
    "a window": AttentionParams(24),
    "a long window": AttentionParams(90, scaling=0.4),
    "a soft cap": AttentionParams(softcap=1.5),
    "sinks": AttentionParams(90, sinks=torch.tensor([-3.0, 0.0, 1.0, 2.0, 30.0, 0.5, -0.5, 4.0])),
    "a soft cap and sinks": AttentionParams(24, 0.3, 2.0, torch.linspace(-1, 4, 8)),
    "a head's": AttentionParams(first=1),
    "a block's": AttentionParams(sees_row=True),
    "a block's in a window": AttentionParams(24, sees_row=True),
}


GROUPED, ODD, LATENT = (8, 2, 16, 16), (3, 1, 24, 24), (2, 2, 24, 10)
CASES = [
    (GROUPED, "plain"), (GROUPED, "a window"), (GROUPED, "a soft cap and sinks"),
    (ODD, "a long window"), (ODD, "sinks"),
    (LATENT, "plain"), (LATENT, "a soft cap"),
    (GROUPED, "a head's"), (ODD, "a block's"), (ODD, "a block's in a window"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "form"), CASES)
@pytest.mark.parametrize("name", ROWS)
def test_attention_is_that_of_torch(name, sizes, form):
    heads, kv_heads, head_dim, value_dim = sizes
    kv = context(90, kv_heads, head_dim, value_dim)
    params = PARAMS[form]
    if params.sinks is not None:
        params = params._replace(sinks=params.sinks[:heads])
    for group in build(ROWS[name], kv).paged.groups:
        if params.sees_row and group.extra is not None:
            pytest.skip("blocks are no trees")
        query = torch.randn(heads, group.rows * group.length, head_dim)
        is_real = (group.places >= 0).flatten()
        found = attend(group, query, kv, params)
        torch.testing.assert_close(
            found[is_real].double(), by_torch(group, query, kv, torch.float64, params)[is_real], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("place", [0, 1])
def test_a_token_at_a_place_that_is_not_attended_to_attends_to_itself(place):
    kv = context(3, 2, 16)
    (group,) = build([ForwardRow([1], place, [1], 1)], kv).paged.groups
    found = attend(group, torch.randn(8, 1, 16), kv, AttentionParams(first=1))
    torch.testing.assert_close(found, kv.values[0][1, place].repeat_interleave(4, 0)[None])


TREE = [-1, -1, 0, 2]


@pytest.mark.parametrize(
    ("form", "parents"), [("plain", None), ("a long window", TREE), ("a soft cap and sinks", TREE), ("a head's", None)]
)
def test_no_bit_depends_on_the_rows_beside_it_or_on_who_computes_a_part(form, parents, in_order, monkeypatch):
    """A context of five chunks in three parts: alone, beside longer rows, cut into rows, and computed by one program.

    More needs a GPU.
    """
    monkeypatch.setattr(paged_attention, "CHUNK", 32)
    monkeypatch.setattr(paged_attention, "NUM_PARTS", 3)
    params, kv, query = PARAMS[form], context(90, 1, 16), torch.randn(4, 5, 16)
    params = params if params.sinks is None else params._replace(sinks=params.sinks[:4])
    row = ForwardRow([1] * 5, 129, [*range(1, 12)], 5, parents)
    (group,) = build([row], kv).paged.groups
    alone = attend(group, query, kv, params)
    beside = [ForwardRow([1] * 7, 310, [*range(40, 60)], 7), row, ForwardRow([1], 2, [80], 1)]
    (wide,) = build(beside, kv).paged.groups
    queries = torch.randn(4, 21, 16)
    queries[:, 7:12] = query
    assert torch.equal(attend(wide, queries, kv, params)[7:12], alone)
    pieces = replace(group, rows=5, length=1, blocks=group.blocks.repeat(5, 1))
    for name in ("positions", "places", "limits", "extra"):
        tensor = getattr(group, name)
        setattr(pieces, name, None if tensor is None else tensor.transpose(0, 1).contiguous())
    assert torch.equal(attend(pieces, query, kv, params), alone)
    monkeypatch.setattr(paged_attention, "MAX_SPLIT_LENGTH", 0)
    assert torch.equal(attend(group, query, kv, params), alone)
    assert torch.equal(attend(wide, queries, kv, params)[7:12], alone)


@pytest.mark.parametrize("name", ["a chain", "trees", "a prompt"])
def test_attention_to_fp8_caches_is_that_to_the_numbers_they_hold(name):
    kv = context(90, 2, 16, dtype=torch.float8_e4m3fn)
    for group in build(ROWS[name], kv).paged.groups:
        query = torch.randn(8, group.rows * group.length, 16)
        is_real = (group.places >= 0).flatten()
        wide = context(90, 2, 16)
        wide.keys[0].copy_(kv.keys[0].float())
        wide.values[0].copy_(kv.values[0].float())
        assert torch.equal(attend(group, query, kv)[is_real], attend(group, query, wide)[is_real])


def test_more_chunks_than_parts_are_all_attended_to(monkeypatch):
    """70 chunks in two parts, for rows beside each other; sharp queries, so that every chunk counts for some."""
    monkeypatch.setattr(paged_attention, "NUM_PARTS", 2)
    monkeypatch.setattr(paged_attention, "CHUNK", 32)
    kv = context(142, 1, 16)
    rows = [
        ForwardRow([1] * 2, 70 * 32 - 5, [*range(1, 142)], 2),
        ForwardRow([1] * 2, 900, [*range(1, 142)], 2, [-1, -1]),
    ]
    for group in build(rows, kv).paged.groups:
        query = torch.randn(2, group.rows * group.length, 16) * 2
        torch.testing.assert_close(
            attend(group, query, kv).double(),
            by_torch(group, query, kv, torch.float64, AttentionParams()),
            atol=2e-5,
            rtol=0,
        )
