"""Paged attention in C++: what torch's own computes, and for each token the same bits in whatever company it comes."""

import ctypes

import pytest
import torch

from engine.execution.cpu.compilation import packages as compilation
from engine.execution.cpu.kernels import library as kernels

INF = float("inf")


@pytest.fixture
def kernel(library):
    """The C++ as packages call it: with handles of tensors."""
    function = ctypes.CDLL(str(library)).aoti_torch_cpu_paged_attention
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_double, ctypes.c_void_p]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def call(query, keys, values, blocks, mask, *, scale):
        tensors = [query, keys, values, blocks, ends_of(mask), mask]
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        output = ctypes.c_void_p()
        assert function(*(pointer_of(capsule, None) for capsule in capsules), scale, ctypes.byref(output)) == 0
        return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(new_capsule(output, None, None))

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return call


def ends_of(mask):
    """Return the place behind the last that each token sees."""
    return ((mask[:, 0] == 0) * torch.arange(1, mask.shape[-1] + 1)).amax(-1)


def example(rows, length, width, *, heads=6, kv_heads=2, dim=32, size=16, seed=0):
    """Random queries, caches and tables; each token sees some places up to one of its own, as in a drafted tree."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1 + rows * width, size, kv_heads, dim, generator=generator) for _ in range(2))
    blocks = 1 + torch.randperm(rows * width, generator=generator).view(rows, width)
    query = torch.randn(rows * length, heads, dim, generator=generator)
    last = torch.randint(1, width * size + 1, (rows, 1, length, 1), generator=generator)
    places = torch.arange(width * size)
    seen = (places < last) & ((places < 2) | (torch.rand(rows, 1, length, width * size, generator=generator) < 0.9))
    return query, keys, values, blocks, torch.where(seen | (places == 0), 0.0, -INF)


def by_torch(tensors, scale):
    *cache, mask = tensors
    return torch.ops.paceline.paged_attention(*cache, ends_of(mask), mask, scale)


SHAPES = [
    {"rows": 1, "length": 1, "width": 1},
    {"rows": 8, "length": 5, "width": 14},
    {"rows": 2, "length": 70, "width": 9},  # more queries than share a reading
    {"rows": 3, "length": 3, "width": 4, "size": 24},
    {"rows": 2, "length": 3, "width": 5, "dim": 128, "heads": 8, "kv_heads": 8},
    {"rows": 2, "length": 29, "width": 30, "size": 3, "dim": 80, "heads": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_torch_does(kernel, shape):
    tensors = example(**shape)
    expected = by_torch(tensors, 0.3)
    assert (kernel(*tensors, scale=0.3) - expected).abs().max() < 1e-5


def test_threads_strides_of_queries_and_other_rows_change_no_bit(kernel):
    query, keys, values, blocks, mask = example(8, 40, 9)
    together = kernel(query, keys, values, blocks, mask, scale=0.2)
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernel(query, keys, values, blocks, mask, scale=0.2), together)
    finally:
        torch.set_num_threads(1)
    wide = torch.zeros(query.shape[0], query.shape[1] + 2, query.shape[2] + 16)
    wide[:, 1:-1, :-16] = query
    assert torch.equal(kernel(wide[:, 1:-1, :-16], keys, values, blocks, mask, scale=0.2), together)
    for row in range(8):
        own = slice(40 * row, 40 * row + 40)
        alone = kernel(query[own], keys, values, blocks[row : row + 1], mask[row : row + 1], scale=0.2)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("shape", [{}, {"size": 3}, {"dim": 80}, {"heads": 7, "kv_heads": 1}], ids=str)
def test_a_token_gets_the_same_bits_in_a_draft_of_any_length(kernel, shape):
    query, keys, values, blocks, mask = example(1, 40, 9, **shape)
    mask[:, :, :3, 20:] = -INF
    together = kernel(query, keys, values, blocks, mask, scale=0.2)
    for length in (1, 2, 3, 4, 5, 7, 9, 33):
        some = kernel(query[:length], keys, values, blocks, mask[:, :, :length].contiguous(), scale=0.2)
        assert torch.equal(some, together[:length])


@pytest.mark.parametrize("gap", [1, 5, 16, 23])
def test_what_lies_between_the_places_seen_changes_no_bit(kernel, gap):
    """A token of a drafted tree has others before it, which it does not see; in a chain it has not."""
    query, keys, values, blocks, mask = example(1, 1, 9)
    places = torch.arange(9 * 16)
    later = (places >= 40) & (places < 60)
    moved = torch.where(later, places + gap, places)
    caches = []
    for own in (keys, values):
        chain = own.clone()
        chain[blocks] = own[blocks].flatten(0, 2)[moved].view(1, 9, *own.shape[1:])
        caches.append(chain)
    seen = torch.full_like(mask, -INF)
    seen[..., :60] = 0.0
    mask[...] = -INF
    mask[..., moved[:60]] = 0.0
    expected = kernel(query, *caches, blocks, seen, scale=0.2)
    assert torch.equal(kernel(query, keys, values, blocks, mask, scale=0.2), expected)


def test_a_wider_table_changes_no_bit(kernel):
    """Another row of the batch may have a longer context; the rest of a short one's table is block 0."""
    query, keys, values, blocks, mask = example(2, 3, 5)
    padding = torch.full((2, 1, 3, 3 * 16), -INF)
    wider = (torch.cat([blocks, torch.zeros(2, 3, dtype=torch.int64)], 1), torch.cat([mask, padding], -1))
    assert torch.equal(
        kernel(query, keys, values, *wider, scale=0.2), kernel(query, keys, values, blocks, mask, scale=0.2)
    )


def test_a_token_that_sees_nothing_gets_zeros_and_what_is_not_finite_stays_visible(kernel):
    """Nobody reads the zeros, but nan would spread."""
    query, keys, values, blocks, mask = example(2, 11, 5)
    expected = kernel(query, keys, values, blocks, mask, scale=0.2)
    mask[1, :, -1] = -INF
    for value in (float("nan"), INF):
        query[4, 1, 7] = value
        found = kernel(query, keys, values, blocks, mask, scale=0.2)
        assert not found[-1].any()
        assert found[4, 1].isnan().all()
        found[4, 1] = expected[4, 1]
        assert torch.equal(found[:-1], expected[:-1])


@pytest.mark.skipif(not compilation.has_compiler(), reason="there is no C++ compiler")
def test_a_source_that_the_compiler_refuses_is_told_in_a_line(tmp_path, monkeypatch):
    source = tmp_path / "wrong.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(kernels, "SOURCES", [source])
    with pytest.raises(compilation.CompileError, match=r"^CppCompileError: [^\n]+$"):
        compilation.compile_kernels(tmp_path / "attention.so")
    assert list(tmp_path.iterdir()) == [source]
