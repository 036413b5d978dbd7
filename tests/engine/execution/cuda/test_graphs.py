"""Which graphs there are, and which a batch runs on; graphs of a GPU are tested there, in `test_cuda_backend`."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.execution.kv_tensors import KVTensors
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.models.layers.layer_attention import KVShape
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import random_head
from tests.engine.tiny import model_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import graphs as graphs_module
from engine.execution.cuda.cuda_backend import GraphedKV
from engine.execution.cuda.graphs import (
    GraphRecorder,
    Graphs,
    choose_shape,
    graph_bytes,
    prompt_shapes,
    shapes,
    table_width,
)
from engine.execution.cuda.static_pass import Outputs, Shape
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
    [(4, 32, "model", False, 25), (4, 32, "model", True, 49), (4, 128, "model", True, 60), (8, 32, "tree", False, 80),
     (1, 3, "model", True, 30), (16, 33, "model", True, 146)],
    ids=["a target", "a draft that runs ahead", "a pool's", "trees", "few tokens", "drafts that take several rows"],
)  # fmt: skip
def test_a_configuration_has_so_few_graphs(k, max_num_seqs, method, run_ahead, count):
    engine = EngineConfig(num_speculative_tokens=k, max_num_seqs=max_num_seqs)
    decoding = shapes(engine, METHODS[method].branches(engine, run_ahead=run_ahead))
    assert len(prompt_shapes(decoding)) + len(decoding) == count
    assert [shape.tokens for shape in decoding] == sorted((shape.tokens for shape in decoding), reverse=True)


@pytest.mark.parametrize(("max_model_len", "width"), [(8192, 522), (131_072, 8202)])
def test_block_tables_are_as_wide_as_the_longest_context_with_its_draft_and_branches(max_model_len, width):
    assert table_width(EngineConfig(), max_model_len) == width
    assert table_width(EngineConfig(max_model_len=8192), max_model_len) == 522
    assert table_width(EngineConfig(num_blocks=7), max_model_len) == 7


def test_the_memory_plan_counts_what_graphs_keep(target_path):
    engine, config = EngineConfig(max_num_seqs=256), model_of(target_path).config
    whole = graph_bytes(engine, config, 8192)
    every = shapes(engine, graphs_module.LENGTHS)
    partials = 1280 * 32 * 4 * (8 + 2) * 4
    assert whole > len(every) * graphs_module._GRAPH_BYTES + partials
    first_layers_too = replace(engine, drafting="self", self_draft_layers=1)
    assert graph_bytes(first_layers_too, config, 8192) == 2 * whole
    assert graph_bytes(engine, config, 8192, num_models=2) == 2 * whole


def test_a_graph_is_recorded_on_one_stream_after_a_pass_alone_that_no_other_work_overtakes(monkeypatch):
    """Other threads may wait for the device while a graph is recorded."""
    calls = []

    @contextlib.contextmanager
    def within(_thing, **options):
        calls.append(options or "side stream")
        yield

    side, main = (
        SimpleNamespace(wait_stream=lambda _, name=name: calls.append(f"{name} waits")) for name in ("side", "main")
    )
    doubles = {"Stream": lambda _: side, "current_stream": lambda _: main, "stream": within, "graph": within}
    doubles |= {"graph_pool_handle": lambda: 7, "CUDAGraph": lambda: SimpleNamespace(replay="replay")}
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    assert GraphRecorder("device").record(lambda: calls.append("the pass")) == "replay"
    options = {"pool": 7, "capture_error_mode": "thread_local"}
    assert calls == ["side waits", "side stream", "the pass", "main waits", options, "the pass"]


EVERY = [Shape(2, 5, 4), Shape(2, 5, 0), Shape(1, 2, 0)]


def graphs_of(model, recorder, shapes=EVERY):
    graphs = Graphs(model, GraphedKV(model.kv_shape, 8, 16, torch.empty(0)), recorder, shapes, 4)
    for shape in shapes:
        graphs.record(shape)
    return graphs


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
        absorbing = [replace(row, num_logits=0) for row in rows(1, 3)]
        assert graphs._fits(build(absorbing, KV), Shape(8, 3, 0)) == (model is target)


@torch.inference_mode()
def test_a_graph_that_does_not_fit_into_memory_is_left_out(target_path, preparation, quick, caplog):
    model = model_of(target_path)
    graphs = graphs_of(model, recorder := CallRecorder(full={1}))
    batch = build(rows(2, 5), graphs._kv)
    assert graphs.run(batch, None) is None
    assert graphs.run(build(rows(1, 2), graphs._kv), None) is not None, "later ones fit"
    assert (len(recorder.computes), preparation.counts["not_recorded"]) == (3, 1)
    assert "no graph of Shape(rows=2, length=5, num_extra=0) could be recorded: no memory" in caplog.text
