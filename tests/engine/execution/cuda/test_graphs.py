"""Which graphs there are, and which a batch runs on; graphs of a GPU are tested there, in `test_cuda_backend`."""

import contextlib
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.execution.kv_tensors import KVTensors
from engine.models.first_layers import first_layers
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.reducer import is_alone
from tests.engine.tiny import model_of

pytest.importorskip("triton", reason="the kernels need triton")
from engine.drafting.run_ahead.passes import WIDTHS as BRANCHES
from engine.execution.cuda import graphs as graphs_module
from engine.execution.cuda.cuda_backend import GraphedKV
from engine.execution.cuda.graphs import MAX_TOKENS, GraphRecorder, Graphs, choose_shape, graph_bytes, shapes
from engine.execution.cuda.static_pass import Shape
from tests.engine.execution.cuda.fake_cuda import fake_gpu
from tests.engine.execution.cuda.recorders import CallRecorder, on_all, ranks

KV = KVTensors(KVShape(1, 1, 1, 1), 2, 16, torch.empty(0))
WIDTHS = (8, 4096)


def rows(count, length, start=20, num_blocks=2, parents=None):
    return [ForwardRow([1] * length, start, [1] * num_blocks, 1, parents)] * count


def draft(count, parents=None):
    return [ForwardRow([1] * (1 + count), 20, [1] * 6, 1 + count, parents)]


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (rows(1, 5), Shape(1, 5, 0, 8)),
        (rows(3, 4), Shape(4, 5, 0, 8)),
        (rows(1, 1), Shape(1, 2, 0, 8)),
        (rows(8, 1), Shape(8, 1, 0, 8)),
        (rows(1, 1, start=200, num_blocks=13), Shape(1, 2, 0, 4096)),
        (rows(1, 4, parents=[-1, 0, 0]), Shape(1, 5, 4, 8)),
        (draft(16) * 8, Shape(8, 24, 0, 8)),
        (draft(64, parents=[node // 4 - 1 for node in range(64)]), Shape(4, 24, 4, 8)),
    ],
)
def test_a_batch_runs_on_the_smallest_graph_that_holds_it(batch, shape):
    assert choose_shape(build(batch, KV), WIDTHS) == shape


@pytest.mark.parametrize(
    "batch",
    [
        rows(1, 40, num_blocks=4),
        [*rows(1, 5), *rows(1, 40, num_blocks=4)],
        rows(257, 1),
        rows(256, MAX_TOKENS // 256 + 1),
        rows(64, 5, start=4000, num_blocks=4000),
        rows(1, 1, start=70_000, num_blocks=4400),
    ],
    ids=["a prompt", "a prompt beside a chain", "rows", "tokens", "partial results", "context"],
)
def test_no_graph_is_as_large(batch):
    assert choose_shape(build(batch, KV), WIDTHS) is None


def test_a_chain_and_a_tree_of_the_default_pair_have_these_graphs():
    found = shapes(EngineConfig(max_num_seqs=3, max_model_len=8000), 131_072, 16)
    assert {(shape.rows, shape.length) for shape in found} == {
        *((rows, length) for rows in (1, 2, 4) for length in (2, 3, 5, 9, 16)),
        *((rows, 1) for rows in (2, 4)),
    }
    assert {(shape.num_extra, shape.width) for shape in found} == {(0, 510)}
    config = EngineConfig(max_num_seqs=3, num_speculative_tokens=8)
    trees = shapes(config, 8000, 16, METHODS["tree"].branches(config))
    assert {(shape.rows, shape.length, shape.num_extra) for shape in trees if shape.num_extra} == {
        (rows, length, extra) for rows in (1, 2, 4) for length in (2, 3, 5, 9) for extra in (4, 8)
    }


@pytest.mark.parametrize(
    ("max_model_len", "widths"), [(8192, [522]), (32_768, [512, 2058]), (131_072, [512, 2048, 8202])]
)
def test_block_tables_have_up_to_three_widths(max_model_len, widths):
    found = shapes(EngineConfig(), max_model_len, 16)
    assert sorted({shape.width for shape in found}) == widths
    assert sorted({shape.width for shape in shapes(EngineConfig(max_model_len=8192), max_model_len, 16)}) == [522]
    assert shapes(EngineConfig(num_blocks=7), max_model_len, 16)[0].width == 7


def test_256_rows_of_five_tokens_have_a_graph_and_larger_graphs_come_first():
    found = shapes(EngineConfig(max_num_seqs=256), 8192, 16)
    assert Shape(256, 5, 0, 522) in found
    assert [shape.tokens for shape in found] == sorted((shape.tokens for shape in found), reverse=True)


def batch_of(rows, length, num_extra, num_tokens, block_size=16):
    group = SimpleNamespace(
        rows=rows,
        length=length,
        extra=torch.empty(rows, length, num_extra, device="meta") if num_extra else None,
        blocks=torch.empty(rows, -(-num_tokens // block_size), device="meta"),
    )
    return SimpleNamespace(paged=SimpleNamespace(groups=[group], kv=SimpleNamespace(block_size=block_size)))


@pytest.mark.parametrize("drafting", ["model", "tree"])
def test_every_decoding_pass_of_a_configuration_has_a_graph_unless_it_is_too_large(drafting):
    generator, ahead = random.Random(0), 0
    for k, max_rows, longest in ((0, 1, 500), (1, 3, 9000), (4, 32, 131_072), (8, 40, 40_000), (16, 300, 8192)):
        engine = EngineConfig(num_speculative_tokens=k, max_num_seqs=max_rows)
        found = set(shapes(engine, longest, 16, METHODS[drafting].branches(engine, run_ahead=True)))
        widths = sorted({shape.width for shape in found})
        for _ in range(1000):
            length, num_extra = 1 + generator.randint(0, k), 0
            if drafting == "tree" and length > 1:
                num_extra = generator.randint(0, length - 1)
            if k and generator.random() < 0.5:
                length, num_extra = generator.choice(BRANCHES), generator.randint(1, k)
                ahead += 1
            size = generator.randint(1, max_rows), length, num_extra, generator.randint(1, longest + k)
            shape = choose_shape(batch_of(*size), widths)
            assert shape is None or shape in found, size
            assert shape is not None or size[0] * length * size[3] > 2**19 or size[0] * length > 160, size
    assert ahead > 1000


def test_only_drafters_that_run_ahead_have_graphs_of_branches():
    assert {shape.num_extra for shape in shapes(EngineConfig(), 8192, 16)} == {0}
    assert METHODS["model"].branches(EngineConfig()) == ()
    found = shapes(EngineConfig(), 8192, 16, METHODS["model"].branches(EngineConfig(), run_ahead=True))
    assert {shape.length for shape in found if shape.num_extra} == {5, 9, 16, 24}


def test_the_memory_plan_counts_what_graphs_keep(target_path):
    engine, config = EngineConfig(max_num_seqs=256), model_of(target_path).config
    whole, half = (graph_bytes(engine, config, 8192, size) for size in (1, 2))
    outputs, partials = 1280 * 64 * 4, 1280 * 33 * 4 * (8 + 2) * 4
    assert whole - len(shapes(engine, 8192, 16)) * graphs_module._GRAPH_BYTES == outputs + partials
    first_layers_too = replace(engine, drafting="self", self_draft_layers=1)
    assert graph_bytes(first_layers_too, config, 8192, 1) == 2 * whole
    assert graph_bytes(engine, config, 8192, 1, has_head=True) == 2 * whole
    assert half == whole - partials // 2 + graphs_module._COMMUNICATION_BYTES


def test_all_graphs_are_warmed_up_on_one_stream(monkeypatch):
    """Each stream keeps memory of its own, cuBLAS's workspace among it."""
    with fake_gpu(monkeypatch):
        streams, make = [], torch.cuda.Stream
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: streams.append(make()) or streams[-1])
        recorder, calls = GraphRecorder(torch.device("cuda", 0)), []
        for _ in range(3):
            recorder.record(lambda: calls.append(is_alone()))
    assert len(streams) == 1
    assert calls == [True, False] * 3, "the warm pass leaves out the other ranks"


def test_a_graph_is_recorded_after_a_first_pass_that_no_other_work_overtakes(monkeypatch):
    """Other threads may wait for the device meanwhile: a mode other than thread_local would make that an error."""
    calls = []

    def stream(name, other):
        return SimpleNamespace(name=name, wait_stream=lambda waited_for: calls.append((name, waited_for.name == other)))

    @contextlib.contextmanager
    def within(thing, **options):
        calls.append(options or thing.name)
        yield
        calls.append("end")

    doubles = {"Stream": lambda _: stream("side", "main"), "current_stream": lambda _: stream("main", "side")}
    doubles |= {"stream": within, "graph": within, "graph_pool_handle": lambda: 7}
    doubles["CUDAGraph"] = lambda: SimpleNamespace(replay="replay")
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    assert GraphRecorder("device").record(lambda: calls.append(f"alone: {is_alone()}")) == "replay"
    first_pass = [("side", True), "side", "alone: True", "end", ("main", True)]
    assert calls == [*first_pass, {"pool": 7, "capture_error_mode": "thread_local"}, "alone: False", "end"]


EVERY = [Shape(2, 5, 4, 4), Shape(2, 5, 0, 4), Shape(1, 2, 0, 4)]


def filled(model, cls=KVTensors):
    kv = cls(model.kv_shape, 8, 16, torch.empty(0))
    generator = torch.Generator().manual_seed(1)
    for cache in (*kv.keys, *kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return kv


def graphs_of(model, recorder, shapes=EVERY, agree=lambda ok: ok):
    graphs = Graphs(model, filled(model, GraphedKV), recorder, shapes, agree)
    for shape in shapes:
        graphs.record(shape)
    return graphs


@torch.inference_mode()
def test_graphs_of_chains_and_trees_give_what_eager_passes_give(target_path):
    model, recorder = first_layers(model_of(target_path), 1), CallRecorder(is_warm=True)
    graphs, kv, eager = graphs_of(model, recorder, EVERY[:2]), filled(model), EagerBackend(model)
    for parents in ([-1, -1, 1, 0], None):
        batch = [ForwardRow([3, 4, 5, 6, 7], 20, [1, 2], 5, parents), ForwardRow([8, 9], 3, [3], 1)]
        output = graphs.run(build(batch, graphs._kv), None)
        torch.testing.assert_close(output.logits, eager.run(build(batch, kv)).logits, atol=2e-4, rtol=0)
    assert recorder.num_replays == 2


@torch.inference_mode()
def test_an_unknown_shape_has_no_graph_in_a_round_but_one_after_an_idle_time(target_path, preparation, quick):
    model, unknown = model_of(target_path), rows(3, 2)
    graphs = graphs_of(model, recorder := CallRecorder())
    with preparation.expected():
        pass
    for _ in range(3):
        assert graphs.run(build(unknown, graphs._kv), None) is None
    assert (len(recorder.computes), preparation.counts["recorded"]) == (len(EVERY), 0)
    with preparation.expected():
        assert graphs.record_wanted() is False
    assert (len(recorder.computes), preparation.counts["recorded"]) == (len(EVERY) + 1, 0)
    assert graphs.run(build(unknown, graphs._kv), None) is not None
    graphs.record(Shape(4, 3, 0, 4))
    assert preparation.counts["recorded"] == 1


@torch.inference_mode()
def test_a_graph_that_does_not_fit_into_memory_is_not_tried_again(target_path, preparation, quick, caplog):
    model = model_of(target_path)
    graphs = graphs_of(model, recorder := CallRecorder(full={1}))
    batch = build(rows(2, 5), graphs._kv)
    for _ in range(2):
        assert graphs.run(batch, None) is None
        assert graphs.record_wanted() is False
    assert graphs.run(build(rows(1, 2), graphs._kv), None) is not None, "later ones fit"
    assert (len(recorder.computes), preparation.counts["not_recorded"]) == (3, 1)
    assert "no graph of Shape(rows=2, length=5, num_extra=0, width=4) could be recorded: no memory" in caplog.text


def test_ranks_use_a_graph_only_if_all_have_recorded_it(target_path, preparation, quick):
    """Whatever each lacks memory for, all choose alike in 10,000 random batches."""
    model, generator, world = model_of(target_path), random.Random(0), ranks(4)
    every = shapes(EngineConfig(max_num_seqs=4), 60, 16)
    full = [set(generator.sample(range(len(every)), 3)) for _ in world]
    made = on_all(world, lambda rank: graphs_of(model, CallRecorder(full[rank.rank]), every, rank.agree))
    recorded = [shape for place, shape in enumerate(every) if place not in set.union(*full)]
    assert [list(graphs._recorded) for graphs in made] == [recorded] * 4
    assert [rank.calls for rank in world] == [[("agree",)] * len(every)] * 4
    for _ in range(10_000):
        batch = batch_of(generator.randint(1, 5), generator.randint(1, 6), 0, generator.randint(1, 70))
        chosen = [choose_shape(batch, graphs._widths) in graphs._recorded for graphs in made]
        assert len(set(chosen)) == 1
