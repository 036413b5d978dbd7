"""What tokens see, and what attention refuses; that it computes what transformers does, test_eager shows."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import AttentionParams, KVShape, paged_attention
from engine.params import SamplingParams
from tests.engine.running import chains, drafters, make_engine, run
from tests.engine.tiny import SIZES, backend_of, save

KV_HEADS, HEADS, DIM, BLOCK = 2, 4, 8, 4


def small_cache():
    return KVTensors(KVShape(1, KV_HEADS, DIM, DIM), num_blocks=20, block_size=BLOCK, like=torch.empty(0))


def prompt(length, block_ids, start=0):
    return ForwardRow([1] * length, start, block_ids, 0)


A = [*range(1, 10)]


def test_a_token_sees_its_own_chunk_only_and_a_node_by_its_position():
    """The tip is at 2, two branches at 3, each with a node at 4; a chunk begins at 4, or at 3."""
    (group,) = build([ForwardRow([1] * 6, 1, [1, 2], 1, [-1, -1, 0, 1])], small_cache()).paged.groups
    before, inside = [[0, 1, 2, 3], [0, 1, 2, 4], [5], [6]], [[3], [4], [3, 5], [4, 6]]
    for chunk, nodes in ((4, before), (3, inside)):
        mask = group.mask(AttentionParams(chunk=chunk), 1, torch.empty(0), BLOCK)[0, 0]
        seen = [[i for i, score in enumerate(row) if score == 0] for row in mask.tolist()]
        assert seen == [[0, 1], [0, 1, 2], *nodes]
    chain = build([prompt(6, A)], small_cache()).paged.groups[0]
    mask = chain.mask(AttentionParams(chunk=4), 1, torch.empty(0), BLOCK)[0, 0]
    assert [int((row == 0).sum()) for row in mask] == [1, 2, 3, 4, 1, 2]
    assert chain.mask(AttentionParams(), 1, torch.empty(0), BLOCK)[0, 0].isfinite().sum() == 21


@pytest.mark.parametrize(
    ("mask", "settings", "message"),
    [
        (None, {"paged": None, "head_mask": 1, "alibi": 2}, "alibi, head_mask"),
        (None, {"paged": None, "dropout": 0.1}, "dropout"),
        (torch.zeros(1), {"paged": None}, "a mask"),
        (None, {}, "do not pass keyword arguments on"),
        (None, {"paged": "off", "softcap": None, "alibi": None, "dropout": 0.0}, None),
    ],
)
def test_a_feature_that_is_not_computed_is_refused_by_name_unless_it_is_off(mask, settings, message):
    states = [torch.zeros(1, heads, 1, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    if message is None:
        settings["paged"] = build([prompt(1, A)], small_cache()).paged
        paged_attention(SimpleNamespace(layer_idx=0), *states, mask, **settings)
    else:
        with pytest.raises(ModelError, match=message):
            paged_attention(SimpleNamespace(layer_idx=0), *states, mask, **settings)


def test_a_heads_states_are_read_at_parents_moved_with_keys_and_never_written_for_padding():
    """Beside an fp8 cache, states keep the model's format."""
    fp8, states = torch.empty(0, dtype=torch.float8_e4m3fn), torch.empty(3, dtype=torch.bfloat16)
    kv = KVTensors(KVShape(2, 1, 8, 8), 4, BLOCK, fp8, KVShape(1, 2, 6, 6), states)
    assert [tuple(cache.shape[-2:]) for cache in kv.added] == [(2, 6), (2, 6), (1, 3)]
    paged = build([ForwardRow([1] * 5, 2, [2, 1], 1, [-1, 0, -1, 1]), ForwardRow([1], 0, [3], 1)], kv).paged
    paged.write_states(paged.slots.float()[:, None].expand(-1, 3))
    assert paged.read_states(of_parents=False)[:6, 0].tolist() == [10, 11, 4, 5, 6, 12]
    kv.states[2, 1] = 9
    assert paged.read_states(of_parents=True)[:6, 0].tolist() == [9, 10, 11, 10, 4, kv.states[0, 0, 0]]
    before = kv.states.clone()
    paged.write_states(torch.full((2, 3), 7.0), torch.tensor([3, -1]))
    assert (kv.states != before).any(-1).nonzero().tolist() == [[0, 0], [1, 1]]
    build([ForwardRow([1], 1, [3], 1)], kv).paged.write_states(torch.full((1, 3), 6.0), torch.tensor([-1]))
    assert kv.states[3].unique().tolist() == [0, 12], "the last token is no padding"
    kv.keys[2][1, 1] = 5.0
    kv.move([5], [11])
    assert (kv.states[2, 3].tolist(), kv.keys[2][2, 3].float().unique().tolist()) == ([7.0] * 3, [5.0])


def test_a_tree_of_a_head_does_not_see_the_place_that_pads_its_paths():
    (group,) = build([ForwardRow([1] * 4, 2, [1, 2], 1, [-1, -1, 1])], small_cache()).paged.groups
    mask = group.mask(AttentionParams(first=1), 1, torch.empty(0), BLOCK)[0, 0]
    assert [[i for i, score in enumerate(row) if score == 0] for row in mask.tolist()] == [
        [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5],
    ]  # fmt: skip


def test_the_text_of_a_target_with_an_fp8_cache_depends_on_nothing_else(tmp_path):
    """Not on drafts, on preemption, or on how much of a prompt is cached: a prompt attends to what its cache holds."""
    path = save(transformers.LlamaConfig(**SIZES), tmp_path, factor=4.0)
    backend = backend_of(path, kv_cache_dtype="fp8", dtype="float32")
    prompt = [*range(3, 40)]
    params = [SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(4)]
    requests = [(prompt[i:], one) for i, one in enumerate(params)]
    plain = run(make_engine(backend, num_speculative_tokens=0), requests)
    assert run(make_engine(backend, chains(backend), num_speculative_tokens=4), requests) == plain
    for settings in (
        {"num_blocks": 26, "block_size": 4},
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
    ):
        engine = make_engine(
            backend, drafters(backend, backend)["trees by the target itself"], num_speculative_tokens=4, **settings
        )
        assert run(engine, requests) == plain
        assert engine.stats.num_preemptions > 0 or "num_blocks" not in settings
    assert run(make_engine(backend_of(path, dtype="float32"), num_speculative_tokens=0), requests) != plain
