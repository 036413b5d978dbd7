"""The cache of keys and values: its sizes, its slots, and entries that move."""

import pytest
import torch

from engine.execution.kv_tensors import KVTensors, slots_of, write_slots
from engine.models.layers.layer_attention import KVShape

KV_HEADS, DIM, BLOCK = 2, 8, 4


def test_moved_entries_are_those_of_an_accepted_path():
    kv = KVTensors(KVShape(3, KV_HEADS, DIM, DIM + 1), num_blocks=3, block_size=BLOCK, like=torch.empty(0))
    for layer, cache in enumerate((*kv.keys, *kv.values)):
        cache.view(12, KV_HEADS, -1)[:] = 100 * layer + torch.arange(12.0).view(-1, 1, 1)
    kv.first_layers(2).move([6, 7], [5, 6])  # 7 goes where 6 came from
    kv.move([1, 0], [0, 1])  # an exchange
    for layer, cache in enumerate((*kv.keys, *kv.values)):
        moved = [1, 0, 2, 3, 4, 6, 7, 7, 8, 9, 10, 11] if layer % 3 < 2 else [1, 0, *range(2, 12)]
        assert (cache.view(12, -1) - 100 * layer == torch.tensor(moved).unsqueeze(-1)).all()


@pytest.mark.parametrize("has_stacks", [False, True])
def test_layers_of_one_size_share_a_tensor_where_that_is_asked_for(has_stacks, monkeypatch):
    """A head's layers stand behind the model's, also where one of those has their size."""
    monkeypatch.setattr(KVTensors, "has_stacks", has_stacks)
    wide, narrow = (KV_HEADS, DIM, DIM), (1, 2 * DIM, DIM)
    shape = KVShape(4, *wide, (wide, narrow, wide, narrow))
    kv = KVTensors(shape, 3, BLOCK, torch.empty(0), KVShape(1, *wide))
    assert [tuple(keys.shape) for keys in kv.keys] == [(3, BLOCK, *size[:2]) for size in (*shape.each, wide)]
    assert [tuple(cache.shape[0:1] + cache.shape[3:]) for cache in kv.added] == [(1, KV_HEADS, DIM)] * 2
    storages = {cache.untyped_storage().data_ptr() for cache in (*kv.keys, *kv.values)}
    assert len(storages) == (6 if has_stacks else 10)
    for caches in (kv.keys, kv.values):
        for cache in caches:
            cache.view(12, -1)[:] = torch.arange(12.0).unsqueeze(-1)
    kv.first_layers(3).move([6], [5])
    for layer, caches in enumerate(zip(kv.keys, kv.values, strict=True)):
        for cache in caches:
            assert cache.view(12, -1)[5].unique().tolist() == [6.0 if layer < 3 else 5.0]
    kv.move([9], [5])
    assert all(cache.view(12, -1)[5].unique().tolist() == [9.0] for cache in (*kv.keys, *kv.values))


def test_a_new_cache_holds_no_nan():
    kv = KVTensors(
        KVShape(1, KV_HEADS, DIM, DIM), num_blocks=3, block_size=BLOCK, like=torch.empty(0, dtype=torch.bfloat16)
    )
    assert kv.keys[0].dtype == torch.bfloat16
    assert not kv.keys[0].any()
    assert not kv.values[0].any()


def test_places_become_slots_and_what_the_table_does_not_reach_goes_to_block_0():
    blocks = torch.tensor([[3, 5]])
    places = torch.tensor([[0, 3, 4, 7, 8, -1]])
    assert slots_of(blocks, places, BLOCK).tolist() == [[12, 15, 20, 23, 0, 0]]


def test_fp8_caches_saturate_and_keep_their_numbers_when_slots_move():
    kv = KVTensors(KVShape(1, 1, 4, 4), 3, 4, torch.empty(0, dtype=torch.float8_e4m3fn))
    write_slots(kv.keys[0], torch.tensor([2, 9]), torch.tensor([[[1.0, -1e5, 449.0, 0.01], [2.0, 3.0, 448.0, 480.0]]]))
    kv.move([2, 9], [9, 2])
    assert kv.keys[0].float().view(-1, 4)[[9, 2]].tolist() == [[1, -448, 448, 0.009765625], [2, 3, 448, 448]]
