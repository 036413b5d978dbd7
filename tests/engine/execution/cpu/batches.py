"""Batches that no single compiled pass computes, and pairs of caches to compare what two passes write."""

import torch

from engine.execution.batch import ForwardRow, build
from tests.engine.conftest import VOCAB


def mixed_rows():
    """Prompts from their start and from the middle, longer than two pieces, among short rows and a tree."""
    ids = torch.randint(2, VOCAB, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.arange(1, 60).flip(0).tolist()
    return [
        ForwardRow(ids[:300], 0, tables[:20], 2),
        ForwardRow(ids[300:301], 20, tables[20:22], 1),
        ForwardRow(ids[310:586], 40, tables[22:42], 276),
        ForwardRow(ids[600:606], 9, tables[42:43], 4, parents=[-1, -1, 0, 1]),
        ForwardRow(ids[620:690], 3, tables[43:48], 0),
    ]


def both_caches(backend):
    """Return two caches of 60 blocks with the same random entries."""
    kv, others = backend.allocate_kv(60, 16), backend.allocate_kv(60, 16)
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        other.copy_(cache.normal_())
    return kv, others


def assert_same_caches(kv, others):
    for cache, other in zip((*kv.keys, *kv.values), (*others.keys, *others.values), strict=True):
        assert torch.allclose(cache[1:], other[1:], atol=1e-5)  # padding goes to block 0


def assert_copies_no_cache(backend):
    """A pass that copied a layer of the cache would allocate more beside a larger one."""
    allocated = []
    for num_blocks in (20, 2000):
        batch = build([ForwardRow([1], 20, [1, 2], 1)], backend.allocate_kv(num_blocks, 16))
        with torch.profiler.profile(profile_memory=True) as profile:
            backend.run(batch)
        allocated.append(sum(max(0, event.self_cpu_memory_usage) for event in profile.events()))
    assert 0 < allocated[0] == allocated[1]
