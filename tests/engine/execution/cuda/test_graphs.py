"""Which graphs there are, and which a batch runs on; graphs of a GPU are tested there, in `test_cuda_backend`."""

import contextlib
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.execution.kv_tensors import KVTensors
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.models.first_layers import first_layers
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.reducer import is_alone
from engine.sampling import noise
from engine.sampling.noise import Draws
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import random_head
from tests.engine.tiny import model_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.drafting.run_ahead.passes import WIDTHS as BRANCHES
from engine.execution.cuda import graphs as graphs_module
from engine.execution.cuda.cuda_backend import GraphedKV
from engine.execution.cuda.graphs import (
    MAX_TOKENS,
    GraphRecorder,
    Graphs,
    choose_shape,
    graph_bytes,
    lengths_of,
    prompt_shapes,
    shapes,
    table_width,
)
from engine.execution.cuda.static_pass import ROWS, Outputs, Shape
from tests.engine.execution.cuda.recorders import CallRecorder

KV = KVTensors(KVShape(1, 1, 1, 1), 2, 16, torch.empty(0))
LENGTHS = {False: [1, 2, 3, 5], True: [3, 9]}


def rows(count, length, start=20, num_blocks=2, parents=None):
    return [ForwardRow([1] * length, start, [1] * num_blocks, 1, parents)] * count


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (rows(1, 5), Shape(1, 5, 0)),
        (rows(3, 4), Shape(4, 5, 0)),
        (rows(1, 1), Shape(1, 2, 0)),
        (rows(8, 1, start=70_000, num_blocks=4400), Shape(8, 1, 0)),
        (rows(1, 4, parents=[-1, 0, 0]), Shape(1, 9, 4)),
        (rows(2, 12), Shape(8, 5, 0)),
        (rows(1, 40), Shape(8, 5, 0)),
        ([*rows(8, 5), *rows(1, 40), *rows(1, 100)], Shape(64, 5, 0)),
        ([*rows(1, 4, parents=[-1, 0, 0]), *rows(1, 40)], Shape(8, 9, 4)),
        (rows(1, 641), None),
        (rows(257, 1), None),
        (rows(1, 66, parents=range(-1, 64)), None),
    ],
    ids=["a chain", "chains", "one token", "long contexts", "a tree", "ends of prompts", "a prompt",
         "prompts beside chains", "a prompt beside a tree", "a long prompt", "rows", "a deep tree"],
)  # fmt: skip
def test_a_batch_runs_on_the_smallest_graph_that_holds_it(batch, shape):
    assert choose_shape(build(batch, KV), LENGTHS) == shape


@pytest.mark.parametrize(
    ("k", "max_num_seqs", "method", "run_ahead", "count"),
    [(4, 32, "model", False, 25), (4, 32, "model", True, 49), (4, 128, "model", True, 60), (8, 32, "tree", False, 80)],
    ids=["a target", "a draft that runs ahead", "a pool's", "trees"],
)
def test_a_configuration_has_so_few_graphs(k, max_num_seqs, method, run_ahead, count):
    engine = EngineConfig(num_speculative_tokens=k, max_num_seqs=max_num_seqs)
    decoding = shapes(engine, METHODS[method].branches(engine, run_ahead=run_ahead))
    assert len(prompt_shapes(decoding)) + len(decoding) == count
    assert [shape.tokens for shape in decoding] == sorted((shape.tokens for shape in decoding), reverse=True)


def batch_of(rows, length, num_extra=0, num_tokens=1, block_size=16):
    group = SimpleNamespace(
        rows=rows,
        length=length,
        extra=torch.empty(rows, length, num_extra, device="meta") if num_extra else None,
        blocks=torch.empty(rows, -(-num_tokens // block_size), device="meta"),
    )
    return SimpleNamespace(paged=SimpleNamespace(groups=[group], kv=SimpleNamespace(block_size=block_size)))


def random_batch(generator, k, max_rows, *, has_trees):
    num_prompts = generator.randint(0, min(2, max_rows - 1))
    num_rows = generator.randint(1, max_rows - num_prompts)
    counts = [generator.choice([0, k, generator.randint(0, k)]) for _ in range(num_rows)]
    batch = [
        ForwardRow([1] * (1 + count), 20, [1] * 6, 1 + count, range(-1, count - 1) if is_tree else None)
        for count in counts
        for is_tree in [has_trees and generator.random() < 0.5]
    ]
    return batch + [one for _ in range(num_prompts) for one in rows(1, generator.randint(1, 200), num_blocks=14)]


@pytest.mark.parametrize("method", ["model", "tree"])
@pytest.mark.parametrize(("k", "max_rows"), [(0, 1), (1, 3), (4, 32), (4, 128), (16, 33), (64, 5), (20, 60)])
def test_every_batch_that_a_graph_of_1280_tokens_would_hold_has_one(method, k, max_rows):
    """Chains, trees and branches, and with fewer tokens short prompts, as `build` mixes them."""
    generator, engine = random.Random(k), EngineConfig(num_speculative_tokens=k, max_num_seqs=max_rows)
    decoding = shapes(engine, METHODS[method].branches(engine, run_ahead=True))
    recorded, lengths, num_chosen = {*decoding, *prompt_shapes(decoding)}, lengths_of(decoding), Counter()
    for _ in range(150):
        batch = build(random_batch(generator, k, max_rows, has_trees=method == "tree"), KV)
        if k and generator.random() < 0.3:
            batch = batch_of(generator.randint(1, max_rows), generator.choice(BRANCHES), generator.randint(1, k))
        groups = batch.paged.groups
        longest = max(group.length for group in groups)
        is_tree = any(group.extra is not None and group.extra.shape[-1] > 0 for group in groups)
        (length, *_), most = [one for one in lengths[is_tree] if one >= longest] or lengths[is_tree][-1:], MAX_TOKENS
        if longest > length:
            most = 640  # some row is a prompt's
        num_rows = sum(group.rows * -(-group.length // length) for group in groups)
        is_held = any(step >= num_rows and step * length <= most for step in ROWS)
        shape = choose_shape(batch, lengths)
        assert (shape in recorded) == is_held, [(group.rows, group.length) for group in groups]
        num_chosen[is_held] += 1
    assert num_chosen[True] > 20


@pytest.mark.parametrize(("max_model_len", "width"), [(8192, 522), (131_072, 8202)])
def test_block_tables_are_as_wide_as_the_longest_context_with_its_draft_and_branches(max_model_len, width):
    assert table_width(EngineConfig(), max_model_len) == width
    assert table_width(EngineConfig(max_model_len=8192), max_model_len) == 522
    assert table_width(EngineConfig(num_blocks=7), max_model_len) == 7


def test_the_memory_plan_counts_what_graphs_keep(target_path):
    engine, config = EngineConfig(max_num_seqs=256), model_of(target_path).config
    whole, half = (graph_bytes(engine, config, 8192, size) for size in (1, 2))
    every = shapes(engine, graphs_module.LENGTHS)
    outputs, partials, tables = 1280 * 64 * 4, 1280 * 32 * 4 * (8 + 2) * 4, sum(one.rows for one in every) * 522 * 4
    assert whole - len(every) * graphs_module._GRAPH_BYTES == outputs + partials + tables
    first_layers_too = replace(engine, drafting="self", self_draft_layers=1)
    assert graph_bytes(first_layers_too, config, 8192, 1) == 2 * whole
    assert graph_bytes(engine, config, 8192, 1, num_models=2) == 2 * whole
    assert half == whole - partials // 2 + graphs_module._COMMUNICATION_BYTES


def test_graphs_share_a_stream_and_are_recorded_after_a_pass_that_no_other_work_overtakes(monkeypatch):
    """Each stream keeps memory of its own. Other threads may wait for the device while a graph is recorded."""
    calls, streams = [], []

    def stream(*_):
        streams.append(SimpleNamespace(wait_stream=lambda other: calls.append("waits for the main stream")))
        return streams[-1]

    @contextlib.contextmanager
    def within(thing, **options):
        calls.append(options or "side stream")
        yield

    main = SimpleNamespace(wait_stream=lambda other: calls.append("the main stream waits"))
    doubles = {"Stream": stream, "current_stream": lambda _: main, "stream": within, "graph": within}
    doubles |= {"graph_pool_handle": lambda: 7, "CUDAGraph": lambda: SimpleNamespace(replay="replay")}
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    recorder = GraphRecorder("device")
    for _ in range(2):
        calls.clear()
        assert recorder.record(lambda: calls.append(f"alone: {is_alone()}")) == "replay"
        assert calls == [
            "waits for the main stream", "side stream", "alone: True", "the main stream waits",
            {"pool": 7, "capture_error_mode": "thread_local"}, "alone: False",
        ]  # fmt: skip
    assert len(streams) == 1


EVERY = [Shape(2, 5, 4), Shape(2, 5, 0), Shape(1, 2, 0)]


def filled(model, cls=KVTensors):
    kv = cls(model.kv_shape, 8, 16, torch.empty(0))
    generator = torch.Generator().manual_seed(1)
    for cache in (*kv.keys, *kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return kv


def graphs_of(model, recorder, shapes=EVERY, agree=lambda ok: ok):
    graphs = Graphs(model, filled(model, GraphedKV), recorder, shapes, 4, agree)
    for shape in shapes:
        graphs.record(shape)
    return graphs


PROMPTS = [
    ForwardRow([3, 4, 5], 20, [1, 2], 3),
    ForwardRow(list(range(3, 23)), 9, [4, 5], 1),
    ForwardRow([7], 3, [6], 1),
    ForwardRow(list(range(9, 27)), 0, [3, 7], 1),
]


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [
        (EVERY[:2], [ForwardRow([3, 4, 5, 6, 7], 20, [1, 2], 5, [-1, -1, 1, 0]), ForwardRow([8, 9], 3, [3], 1)]),
        (EVERY[:2], [ForwardRow([3, 4, 5, 6, 7], 20, [1, 2], 5), ForwardRow([8, 9], 3, [3], 1)]),
        ([Shape(16, 3, 0)], PROMPTS),  # rows of the same graph, whose lengths are the draft's
    ],
    ids=["a tree", "a chain", "prompts beside chains"],
)
@torch.inference_mode()
def test_a_graph_gives_what_an_eager_pass_gives(shapes, batch, target_path):
    model, recorder = first_layers(model_of(target_path), 1), CallRecorder(is_warm=True)
    graphs, kv, eager = graphs_of(model, recorder, shapes), filled(model), EagerBackend(model)
    keys = noise.keys(range(6), range(6), 0, torch.device("cpu"))
    draws = Draws(torch.full((6, 1), 0.8), keys, torch.arange(1, 7))
    output, right = graphs.run(build(batch, graphs._kv), draws), eager.run(build(batch, kv), draws)
    torch.testing.assert_close(output.logits, right.logits, atol=2e-4, rtol=0)
    assert torch.equal(output.tokens, right.tokens)
    for cache, other in zip((*graphs._kv.keys, *graphs._kv.values), (*kv.keys, *kv.values), strict=True):
        torch.testing.assert_close(cache[1:], other[1:], atol=2e-4, rtol=0)
    assert recorder.num_replays == 1


@torch.inference_mode()
def test_what_exceeds_tables_or_outputs_has_no_graph(target_path, preparation, quick):
    graphs = graphs_of(model_of(target_path), CallRecorder(), [Shape(2, 5, 0), Shape(4, 5, 0)])
    graphs._outputs = Outputs(*(one[:10] for one in graphs._outputs))
    for length, start, num_logits, has_graph in ((5, 20, 5, True), (5, 20, 6, False), (5, 60, 1, False)):
        batch = [ForwardRow([3] * (length + num_logits // 6), start, [1] * 5, num_logits)] * 2
        assert (graphs.run(build(batch, graphs._kv), None) is not None) == has_graph, (start, num_logits)


def test_rows_of_blocks_are_never_cut(target_path):
    """Their tokens see their whole row, which the target's do not, though it feeds the head."""
    target = model_of(target_path)
    target = with_head(target, random_head(target, block_config(["sliding_attention", "full_attention"])))
    for model, length, fits in ((target, 9, True), (head_model(target), 3, True), (head_model(target), 9, False)):
        graphs = Graphs(model, KV, CallRecorder(), [Shape(8, 3, 0)], 4)
        assert graphs._fits(build(rows(1, length), KV), Shape(8, 3, 0)) == fits


@torch.inference_mode()
def test_a_graph_that_does_not_fit_into_memory_is_left_out(target_path, preparation, quick, caplog):
    model = model_of(target_path)
    graphs = graphs_of(model, recorder := CallRecorder(full={1}))
    batch = build(rows(2, 5), graphs._kv)
    assert graphs.run(batch, None) is None
    assert graphs.run(build(rows(1, 2), graphs._kv), None) is not None, "later ones fit"
    assert (len(recorder.computes), preparation.counts["not_recorded"]) == (3, 1)
    assert "no graph of Shape(rows=2, length=5, num_extra=0) could be recorded: no memory" in caplog.text
