"""The attention function against a softmax that is written down again token by token, and what it refuses."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.execution.attention import attend_to_gathered
from engine.execution.batch import MAX_DRAFT_LENGTH, MAX_GROUPED_LENGTH, ForwardRow, build
from engine.execution.forward_row import depths
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import AttentionParams, KVShape, paged_attention
from engine.params import SamplingParams
from tests.engine.running import chains, drafters, make_engine, run
from tests.engine.tiny import SIZES, backend_of, save

KV_HEADS, HEADS, DIM, BLOCK = 2, 4, 8, 4
LONG = MAX_GROUPED_LENGTH + MAX_DRAFT_LENGTH + 3


class Layer:
    """One attention layer, its cache, and a plain record of the keys and values that each request has."""

    def __init__(self, seed=0, dtype=torch.float32):
        like = torch.empty(0, dtype=dtype)
        self.kv = KVTensors(KVShape(1, KV_HEADS, DIM, DIM), num_blocks=140, block_size=BLOCK, like=like)
        self.generator = torch.Generator().manual_seed(seed)
        self.entries = {}

    def run(self, *rows, window=None):
        """Pass random states of the rows' tokens through the function; return its outputs and the expected ones."""
        batch = build([replace(row, num_logits=len(row.token_ids)) for row in rows], self.kv)
        num_tokens = len(batch.token_ids)
        query, key, value = (
            torch.randn(1, heads, num_tokens, DIM, generator=self.generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        output, weights = paged_attention(
            SimpleNamespace(layer_idx=0), query, key, value, None, paged=batch.paged, sliding_window=window
        )
        assert weights is None
        assert output.is_contiguous(), "some models view it in another shape"
        key, value = (states.to(self.kv.keys[0].dtype).float() for states in (key, value))
        indices = iter(batch.logit_indices.tolist())  # of all tokens, in the order of the rows
        found, expected = [], []
        for row in rows:
            entries = self.entries.setdefault(row.block_ids[0], {})
            flat = [next(indices) for _ in row.token_ids]
            entries |= {row.start + nth: (key[0, :, i], value[0, :, i]) for nth, i in enumerate(flat)}
            for nth, i in enumerate(flat):
                found.append(output[0, i])
                expected.append(attend(query[0, :, i], [entries[place] for place in visible(row, nth, window)]))
        return torch.stack(found), torch.stack(expected)


def visible(row, nth, window):
    """The places that the row's nth token sees: all before it, and of a tree its ancestors only."""
    num_nodes = len(row.parents or ())
    num_committed = len(row.token_ids) - num_nodes
    node = nth - num_committed
    tip = row.start + num_committed - 1
    if node < 0:
        places, position = list(range(row.start + nth + 1)), row.start + nth
    else:
        path, position = [], tip + depths(row.parents)[node]
        while node >= 0:
            path.append(tip + 1 + node)
            node = row.parents[node]
        places = [*range(tip + 1), *path]
    return [place for place in places if window is None or place > position - window]


def attend(query, entries):
    """Softmax attention of one token. [heads, d] -> [heads, d]."""
    copies = HEADS // KV_HEADS
    keys, values = (torch.stack(states, 1).repeat_interleave(copies, 0) for states in zip(*entries, strict=True))
    weights = (torch.einsum("hd,hnd->hn", query, keys) / math.sqrt(DIM)).softmax(-1)
    return torch.einsum("hn,hnd->hd", weights, values)


def prompt(length, block_ids, start=0):
    return ForwardRow([1] * length, start, block_ids, 0)


A, B, C = list(range(1, 46)), list(range(46, 91)), list(range(91, 136))


@pytest.mark.parametrize("window", [None, 5], ids=["all", "window"])
@pytest.mark.parametrize("length", [1, 7, LONG])
def test_a_prompt_attends_to_itself(length, window):
    torch.testing.assert_close(*Layer().run(prompt(length, A), window=window))


@pytest.mark.parametrize("window", [None, 5], ids=["all", "window"])
def test_every_kind_of_row_in_one_pass_attends_to_its_own_request(window):
    layer = Layer()
    layer.run(prompt(9, A), prompt(LONG, B), prompt(6, C))
    tree = ForwardRow([1] * 5, 6, C, 0, parents=[-1, -1, 1, 0])
    rows = (prompt(1, A, 9), prompt(4, B, LONG), tree)
    torch.testing.assert_close(*layer.run(*rows, window=window))


@pytest.mark.parametrize("window", [None, 70], ids=["all", "window"])
@pytest.mark.parametrize("num_nodes", [MAX_GROUPED_LENGTH, 40, MAX_DRAFT_LENGTH])
def test_a_large_tree_and_a_long_chain_share_a_group_with_short_rows(num_nodes, window):
    layer, chance = Layer(), random.Random(num_nodes)
    layer.run(prompt(9, A), prompt(LONG, B), prompt(6, C))
    parents = [chance.randrange(-1, node) for node in range(num_nodes)]
    tree = ForwardRow([1] * (1 + num_nodes), 6, C, 0, parents=parents)
    rows = (prompt(1, A, 9), tree, prompt(1 + num_nodes, B, LONG))
    batch = build([replace(row, num_logits=len(row.token_ids)) for row in rows], layer.kv)
    assert len(batch.paged.groups) == 1
    assert len(batch.token_ids) <= 1.25 * (3 + 2 * num_nodes)
    torch.testing.assert_close(*layer.run(*rows, window=window))


def test_padding_changes_no_entry_but_those_of_block_0():
    layer = Layer()
    layer.run(prompt(6, A))
    before = layer.kv.keys[0].clone()
    layer.run(prompt(1, A, 6), prompt(3, B))
    changed = (layer.kv.keys[0] != before).flatten(2).any(-1).nonzero().tolist()
    assert [place for place in changed if place[0]] == [[2, 2], [46, 0], [46, 1], [46, 2]]


def test_a_token_sees_its_own_chunk_only_and_a_node_by_its_position():
    """The tip is at 2, two branches at 3, each with a node at 4; a chunk begins at 4, or at 3."""
    (group,) = build([ForwardRow([1] * 6, 1, [1, 2], 1, [-1, -1, 0, 1])], Layer().kv).paged.groups
    before, inside = [[0, 1, 2, 3], [0, 1, 2, 4], [5], [6]], [[3], [4], [3, 5], [4, 6]]
    for chunk, nodes in ((4, before), (3, inside)):
        mask = group.mask(AttentionParams(chunk=chunk), 1, torch.empty(0), BLOCK)[0, 0]
        seen = [[i for i, score in enumerate(row) if score == 0] for row in mask.tolist()]
        assert seen == [[0, 1], [0, 1, 2], *nodes]
    chain = build([prompt(6, A)], Layer().kv).paged.groups[0]
    mask = chain.mask(AttentionParams(chunk=4), 1, torch.empty(0), BLOCK)[0, 0]
    assert [int((row == 0).sum()) for row in mask] == [1, 2, 3, 4, 1, 2]
    assert chain.mask(AttentionParams(), 1, torch.empty(0), BLOCK)[0, 0].isfinite().sum() == 21


def test_a_layer_that_shares_reads_the_blocks_of_another_and_writes_none():
    layer = Layer()
    layer.run(prompt(7, A))
    batch = build([prompt(2, A, 5)], layer.kv)
    nothing, query = torch.full((1, KV_HEADS, 2, DIM), math.nan), torch.randn(1, HEADS, 2, DIM)
    before = [cache.clone() for cache in (*layer.kv.keys, *layer.kv.values)]
    module = SimpleNamespace(layer_idx=5, kv_layer=0, is_kv_shared_layer=True)
    output, _ = paged_attention(module, query, nothing, nothing, None, paged=batch.paged)
    entries = layer.entries[A[0]]
    expected = [attend(query[0, :, i], [entries[place] for place in range(6 + i)]) for i in range(2)]
    torch.testing.assert_close(output[0], torch.stack(expected))
    assert all(map(torch.equal, before, (*layer.kv.keys, *layer.kv.values)))
    assert batch.paged.layers == []


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
        settings["paged"] = build([prompt(1, A)], Layer().kv).paged
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
    (group,) = build([ForwardRow([1] * 4, 2, [1, 2], 1, [-1, -1, 1])], Layer().kv).paged.groups
    mask = group.mask(AttentionParams(first=1), 1, torch.empty(0), BLOCK)[0, 0]
    assert [[i for i, score in enumerate(row) if score == 0] for row in mask.tolist()] == [
        [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5],
    ]  # fmt: skip


VALUE_DIM = 6
SINKS = torch.tensor([-2.0, 0.0, 1.0, 20.0])
PARAMS = {
    "plain": AttentionParams(),
    "a scale": AttentionParams(scaling=0.2),
    "a soft cap": AttentionParams(softcap=1.5),
    "sinks": AttentionParams(sinks=SINKS),
    "all": AttentionParams(scaling=0.7, softcap=3.0, sinks=SINKS),
}


def attended(query, keys, values, visible, params, head):
    """One token and head: [key_dim], [places, key_dim], [places, value_dim] -> [value_dim]."""
    scale = 1 / math.sqrt(DIM) if params.scaling is None else params.scaling
    total, output = 0.0, torch.zeros(VALUE_DIM, dtype=torch.float64)
    for key, value, is_visible in zip(keys.double(), values.double(), visible, strict=True):
        score = float(query.double() @ key) * scale
        if params.softcap is not None:
            score = params.softcap * math.tanh(score / params.softcap)
        if is_visible:
            total += math.exp(score)
            output += math.exp(score) * value
    if params.sinks is not None:
        total += math.exp(params.sinks[head])
    return output / total


@pytest.mark.parametrize("name", PARAMS)
def test_each_token_gets_the_weighted_mean_of_the_values_that_it_sees(name):
    params = PARAMS[name]
    rows, length, context = 2, 3, 8
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, rows * length, DIM, generator=generator)
    key = torch.randn(rows, context, KV_HEADS, DIM, generator=generator)
    value = torch.randn(rows, context, KV_HEADS, VALUE_DIM, generator=generator)
    visible = torch.rand(rows, length, context, generator=generator) < 0.6
    visible[..., 0] = True
    mask = torch.where(visible, 0.0, float("-inf")).unsqueeze(1).repeat(1, 1, HEADS // KV_HEADS, 1)
    output = attend_to_gathered(rows, length, query, key, value, mask, params)
    assert output.shape == (rows * length, HEADS, VALUE_DIM)
    for row in range(rows):
        for token in range(length):
            for head in range(HEADS):
                keys, values = key[row, :, head // 2], value[row, :, head // 2]
                place = row * length + token
                right = attended(query[head, place], keys, values, visible[row, token], params, head)
                torch.testing.assert_close(output[place, head].double(), right, atol=1e-5, rtol=0)


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


def test_prompts_and_later_tokens_attend_to_the_numbers_that_an_fp8_cache_holds():
    layer = Layer(dtype=torch.float8_e4m3fn)
    torch.testing.assert_close(*layer.run(prompt(7, A)))
    torch.testing.assert_close(*layer.run(prompt(3, A, start=7), prompt(2, B)))
