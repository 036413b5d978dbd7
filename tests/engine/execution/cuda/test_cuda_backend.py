"""CudaBackend: the eager pass's results, interpreted on a CPU, and on a GPU before and after it is warmed up."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import Shard, forward
from engine.models.first_layers import first_layers
from engine.models.layers.layer_attention import KVShape
from engine.params import SamplingParams
from engine.sampling import noise
from engine.sampling.noise import Draws
from tests.engine.ranks import AbsentOthers
from tests.engine.running import drafters, make_engine, run
from tests.engine.tiny import model_of
from tests.gpu.models import random_model

pytest.importorskip("triton", reason="the kernels need triton")
from triton.runtime.errors import OutOfResources

from engine.execution.cuda import cuda_backend
from engine.execution.cuda.chain_pass import chain_shapes
from engine.execution.cuda.cuda_backend import CudaBackend, GraphedKV, make_cuda_backend
from engine.execution.cuda.graphs import Graphs, prompt_shapes, shapes
from engine.execution.cuda.kernels import cache_write, triton_attention
from tests.engine.execution.cuda.recorders import ENGINE, SETTINGS, CallRecorder

EVERY = [*prompt_shapes(shapes(ENGINE)), *shapes(ENGINE)]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda", 0)
REQUESTS = [
    ([*range(3, 20 + i)], SamplingParams(temperature=0.5 * (i % 3), seed=i, max_tokens=40, ignore_eos=True))
    for i in range(6)
]


def texts(backend, drafter, **settings):
    engine = make_engine(backend, drafter, num_blocks=200, num_speculative_tokens=4, **settings)
    backend.warm_up()
    return run(engine, REQUESTS)


@pytest.fixture(scope="module")
def expected():
    return texts(EagerBackend(random_model("tiny", torch.device("cpu"), torch.float32)), None)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("is_compiled", ["off", "auto"])
@pytest.mark.parametrize("name", ["the target itself", "running ahead", "trees", "trees that grow on"])
def test_texts_depend_on_neither_draft_nor_batch_and_in_float32_are_those_of_a_cpu(name, is_compiled, expected):
    model, settings = random_model("tiny", torch.device("cpu"), torch.float32), ModelConfig("tiny", compile=is_compiled)
    model.module.to(DEVICE)
    model.device = DEVICE
    backend = CudaBackend(model, settings, EngineConfig())
    for drafter in (None, drafters(backend, backend)[name]):
        assert texts(backend, drafter) == expected
    backend = CudaBackend(random_model("tiny", DEVICE, torch.bfloat16), settings, EngineConfig())
    alone = texts(backend, None, max_num_seqs=1)
    assert texts(backend, drafters(backend, backend)[name]) == alone
    assert texts(backend, None, max_num_batched_tokens=24, enable_prefix_caching=False) == alone


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no CUDA device")
def test_an_interpreted_backend_and_its_first_layers_compute_what_eager_ones_do(monkeypatch):
    monkeypatch.setattr(cuda_backend, "_kinds_of_passes", lambda *_, **__: [])
    rows = [
        ForwardRow([3] * 4, 0, [1], 2),
        ForwardRow([5, 6, 7, 8], 0, [2], 4, [-1, -1, 1]),
        ForwardRow(list(range(20)), 0, [3, 4], 1),
    ]
    keys = noise.keys(range(5), range(5), noise.TARGET_STREAM, torch.device("cpu"))
    draws = Draws(torch.linspace(1.0, 0.5, 7).unsqueeze(-1), keys, torch.tensor([0, 1, 2, 3, 4, 5, 0]))
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    eager, backend = EagerBackend(model), make_cuda_backend(model, ModelConfig("tiny"), EngineConfig())
    kv, other_kv = backend.allocate_kv(8, 16), eager.allocate_kv(8, 16)
    assert isinstance(kv, GraphedKV)
    backend.warm_up()  # with compile=off, nothing is compiled
    for (one, cache), (other, other_cache) in zip(
        [(backend, kv), backend.beside(partial(first_layers, count=1), kv)],
        [(eager, other_kv), eager.beside(partial(first_layers, count=1), other_kv)],
        strict=True,
    ):
        output, expected = one.run(build(rows, cache), draws), other.run(build(rows, other_cache), draws)
        torch.testing.assert_close(output.scores, expected.scores, atol=1e-5, rtol=0)
        assert torch.equal(output.tokens, expected.tokens)
    backend.wait()
    assert not backend.is_busy


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no CUDA device")
def test_a_pass_without_a_graph_bounds_its_results_of_chunks_and_computes_two_tokens_at_least(monkeypatch):
    """A layer compiled for one token alone could round differently."""
    monkeypatch.setattr(cuda_backend, "MAX_TOKENS", 5)
    seen, computed, attend = [], [], triton_attention.attend
    monkeypatch.setattr(cuda_backend, "forward", lambda *inputs: computed.append(len(inputs[3])) or forward(*inputs))
    monkeypatch.setattr(triton_attention, "attend", lambda group, *rest: seen.append(group) or attend(group, *rest))
    model = first_layers(random_model("tiny", torch.device("cpu"), torch.float32), 1)
    eager, backend = EagerBackend(model), make_cuda_backend(model, ModelConfig("tiny"), EngineConfig())
    kv, other_kv = backend.allocate_kv(8, 16), eager.allocate_kv(8, 16)
    for rows, sizes, num_logits in (
        ([ForwardRow([3, 4], 0, [1], 1), ForwardRow([5, 6], 0, [2], 2), ForwardRow([7], 0, [3], 1)],
         [(2, 2), (1, 2)], 4),
        ([ForwardRow([8], 2, [1], 1)], [(1, 2)], 2),  # a head's last norm computes the logits' tokens only
    ):  # fmt: skip
        seen.clear()
        torch.testing.assert_close(
            backend.logits(build(rows, kv)), eager.logits(build(rows, other_kv)), atol=1e-5, rtol=0
        )
        assert [(group.rows, group.length) for group in seen] == sizes
        assert computed.pop() == num_logits


def test_all_shapes_are_recorded_before_the_first_round(target_path, uncompiled, quick, preparation, monkeypatch):
    """Those of the model and of its first layers, and the chains of all drafters: a pool's, one of which runs ahead."""
    progress, record = [], Graphs.record
    monkeypatch.setattr(Graphs, "record", lambda *call: progress.extend(backend.compiling) or record(*call))
    backend = CudaBackend(model_of(target_path), SETTINGS, ENGINE, recorder=CallRecorder())
    kv = backend.allocate_kv(8, ENGINE.block_size)
    thinned, seen_kv = backend.beside(partial(first_layers, count=1), kv)
    for plan in ((2, 0), (2, 10), (2, 0)):
        backend.plan_chains(*plan)
    backend.warm_up()
    chains = {*chain_shapes(2, 2, 0), *chain_shapes(2, 2, 10)}
    assert chains
    assert {*kv.graphs._recorded} == {*EVERY, *chains}
    assert {*seen_kv.graphs._recorded} == {*EVERY}
    num_graphs = len(kv.graphs._recorded)
    assert [entry[:2] for entry in progress[:num_graphs]] == [(done, num_graphs) for done in range(num_graphs)]
    assert (backend.compiling, thinned.compiling) == ([], [])
    assert backend.beside(partial(first_layers, count=1), kv)[1].graphs is None, "those of the whole model"
    backend.close()
    assert (kv.graphs, seen_kv.graphs) == (None, None)
    preparation.observe("compiled")
    assert preparation.counts["compiled"] == 1, "rounds may come now"


def test_every_kind_of_pass_is_warmed_up(monkeypatch):
    """Kernels differ by powers of two of tokens, by long prompts, by many rows, and by nodes of trees."""
    engine = EngineConfig(max_num_batched_tokens=2000)
    lengths, extras = set(), set()
    for rows in cuda_backend._kinds_of_passes(engine, 1500, has_trees=True):
        kv = GraphedKV(KVShape(1, 1, 1, 1), 1, 16, torch.empty(0))
        batch = build(rows, kv)
        assert max(int(group.blocks.max()) for group in batch.paged.groups) == 0, "only block 0 is written"
        lengths |= {tuple(group.length for group in batch.paged.groups)}
        extras |= {(group.length, group.extra.shape[-1]) for group in batch.paged.groups if group.extra is not None}
    assert {(length,) for length in (1, 2, 4, 8, 16)} | {(32, 32), (2, 33), (2, 65), (2, 1500)} == lengths
    assert {(8, 4), (16, 8), (32, 16)} <= extras


def test_a_model_that_cannot_be_compiled_runs_eagerly_and_says_so(
    target_path, uncompiled, quick, preparation, monkeypatch, caplog
):
    names, lengths = [], []
    backend = CudaBackend(model_of(target_path), SETTINGS, ENGINE, recorder=CallRecorder())
    kv = backend.allocate_kv(12, ENGINE.block_size)

    def fail(_module):
        raise torch.OutOfMemoryError("no memory is left")

    def attend(group, _query, _keys, _values, output, _params):
        lengths.append(group.length)
        output.fill_(0.0)

    monkeypatch.setattr(cuda_backend, "compile_layers", fail)
    monkeypatch.setattr(cuda_backend, "uncompile_layers", names.append)
    monkeypatch.setattr(triton_attention, "attend", attend)
    backend.warm_up()
    assert kv.graphs is None
    assert names == [backend.model.module]
    assert preparation.counts["eager"] == 1
    assert "texts may differ from those of compiled passes: no memory is left" in caplog.text
    assert {1, 2, 32, 33, 40} <= {*lengths}, "every kernel was tried"


@pytest.mark.parametrize(
    ("compile", "module", "fails"), [("auto", triton_attention, "attend"), ("off", cache_write, "write")]
)
def test_a_gpu_on_which_passes_fail_is_refused_before_the_first_request(
    compile, module, fails, target_path, uncompiled, quick, preparation, monkeypatch
):
    """Though the model's first two tokens were computed, and layers that are not compiled may do."""

    def fail(_first, second, *_):
        if second.shape[1] > 2:
            raise OutOfResources(299_520, 232_448, "shared memory")

    backend = CudaBackend(model_of(target_path), ModelConfig("tiny", compile=compile), ENGINE, recorder=CallRecorder())
    backend.allocate_kv(8, ENGINE.block_size)
    monkeypatch.setattr(module, fails, fail)
    with pytest.raises(ModelError, match="cannot be served on cpu, where a pass fails: out of resource: shared memory"):
        backend.warm_up()


def test_a_model_that_no_kernel_holds_is_eager_and_one_that_memory_does_not_hold_is_refused(monkeypatch, caplog):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory is left")

    caplog.set_level("INFO", cuda_backend.logger.name)
    model = random_model("tiny", torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(cuda_backend, "make_invariant", fail)
    with pytest.raises(ModelError, match=r"tiny does not fit into the memory of cpu: no memory is left"):
        make_cuda_backend(model, ModelConfig("tiny"), ENGINE)
    monkeypatch.setattr(cuda_backend, "MAX_DIM", 8)
    assert type(make_cuda_backend(model, ModelConfig("tiny"), ENGINE)) is EagerBackend
    assert "its heads of 16 are too wide for the kernel that attends" in caplog.text
    shard = Shard(0, 1, AbsentOthers())
    assert type(make_cuda_backend(replace(model, shard=shard), ModelConfig("tiny"), ENGINE)) is EagerBackend
    assert "it is one of 1 ranks; execution=vllm computes several with CUDA graphs" in caplog.text
