"""Traced attention against the eager one: the same outputs, and the same entries in the cache."""

import pytest
import torch

from engine.execution.attention import KVShape, KVTensors, additive_mask, slots_of
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu.paged_attention import suits
from engine.execution.cpu.traced import TracedContext
from engine.execution.dot_product import AttentionParams

KV_HEADS, BLOCK = 2, 4
ROWS = {
    "single tokens": [ForwardRow([1], 9, [1, 2, 3], 1), ForwardRow([2], 0, [4], 1)],
    "rows of several lengths": [ForwardRow([1] * 5, 3, [1, 2], 5), ForwardRow([1] * 2, 6, [3, 4], 2)],
    "a tree and a chain": [
        ForwardRow([1] * 5, 6, [1, 2, 3], 5, parents=[-1, -1, 0, 1]),
        ForwardRow([1] * 3, 2, [4, 5], 3),
    ],
    "part of a prompt": [ForwardRow([1] * 20, 7, [1, 2, 3, 4, 5, 6, 7], 20)],
}


def traced(batch, windows):
    """Return a batch's context with the tensors that the compiled step makes of it."""
    kv, (group,) = batch.paged.kv, batch.paged.groups
    extra = group.extra
    context = group.blocks.shape[1] * kv.block_size
    ends = group.limits if extra is None else torch.maximum(group.limits, extra.amax(-1) + 1)
    masks = {
        window: additive_mask(context, group.positions, group.limits, extra, window, torch.float32)
        for window in windows
    }
    slots = slots_of(group.blocks, group.places, kv.block_size).flatten()
    return TracedContext(kv.keys, kv.values, slots, group.blocks, ends, masks)


def caches(head_dim, value_dim=None):
    """Two caches of two layers with the same random entries."""
    generator = torch.Generator().manual_seed(0)
    value_dim = value_dim or head_dim
    one, other = (KVTensors(KVShape(2, KV_HEADS, head_dim, value_dim), 10, BLOCK, torch.empty(0)) for _ in range(2))
    for cache, copied in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        copied.copy_(cache.normal_(generator=generator))
    return one, other


@pytest.mark.parametrize("head_dim", [8, 16], ids=["small heads", "heads that the C++ computes"])
@pytest.mark.parametrize("heads", [2, 6], ids=["a key head per query head", "grouped heads"])
@pytest.mark.parametrize("name", ROWS)
def test_it_attends_and_writes_as_the_eager_context_does(name, heads, head_dim):
    assert suits(head_dim, torch.float32) == (head_dim == 16)
    kv, others = caches(head_dim)
    batch, same = build(ROWS[name], kv), build(ROWS[name], others)
    windows = [None, 3] if batch.paged.groups[0].extra is None else [None, 9]
    context = traced(same, windows)
    generator = torch.Generator().manual_seed(1)
    # Some tokens are padding: nobody reads what is computed for them.
    sinks = torch.randn(heads, generator=generator)
    for layer, params in (
        (0, AttentionParams()),
        (1, AttentionParams(windows[1], 0.5)),
        (0, AttentionParams(windows[1])),
        (1, AttentionParams(windows[1], softcap=2.0)),
        (0, AttentionParams(scaling=0.3, sinks=sinks)),
    ):
        query, key, value = (
            torch.randn(count, len(batch.token_ids), head_dim, generator=generator)
            for count in (heads, KV_HEADS, KV_HEADS)
        )
        expected = batch.paged.attend(layer, query, key, value, params)
        found = context.attend(layer, query, key, value, params)
        assert found.shape == expected.shape
        wanted = batch.logit_indices
        assert torch.allclose(found[wanted], expected[wanted], atol=1e-5)
    for cache, copied in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.equal(cache[1:], copied[1:])


def test_a_mask_is_copied_once_for_all_layers():
    kv, _ = caches(8)
    context = traced(build(ROWS["a tree and a chain"], kv), [None, 9])
    mask = context.mask(9, 3)
    assert torch.equal(mask, torch.cat([context.masks[9]] * 3, -2))
    assert context.mask(9, 3) is mask
    assert context.mask(None, 3) is not mask
    assert context.mask(9, 2).shape[-2] == 2 * 5
