"""CudaBackend: the eager pass's results, interpreted on a CPU, and on a GPU before and after it is warmed up."""

import pytest
import torch

from engine.config import ModelConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.drafting.run_ahead.trees import RunAheadTreeDrafter
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.params import SamplingParams
from engine.sampling import noise
from engine.sampling.noise import Draws
from tests.engine.running import make_engine, run
from tests.fakes import InterruptedDrafter, TreeDrafter
from tests.gpu.models import random_model

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.cuda_backend import CudaBackend, GraphedKV, make_cuda_backend

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda", 0)
REQUESTS = [
    ([*range(3, 20 + i)], SamplingParams(temperature=0.5 * (i % 3), seed=i, max_tokens=40, ignore_eos=True))
    for i in range(6)
]
DRAFTERS = {
    "no draft": lambda _: None,
    "itself": lambda backend: lambda config: ModelDrafter(DraftModel(backend), config),
    "running ahead": lambda backend: lambda config: InterruptedDrafter(RunAheadDrafter(DraftModel(backend), config)),
    "trees": lambda _: lambda _config: TreeDrafter(range(2, 20)),
    "trees that grow on": lambda backend: (
        lambda config: InterruptedDrafter(RunAheadTreeDrafter(DraftModel(backend), config))
    ),
}


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
@pytest.mark.parametrize("name", DRAFTERS)
def test_float32_texts_are_those_of_a_cpu(name, is_compiled, expected):
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    model.module.to(DEVICE)
    model.device = DEVICE
    backend = CudaBackend(model, ModelConfig("tiny", compile=is_compiled))
    assert texts(backend, DRAFTERS[name](backend)) == expected


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_bfloat16_texts_depend_on_neither_draft_nor_batch(name):
    backend = CudaBackend(random_model("tiny", DEVICE, torch.bfloat16), ModelConfig("tiny", compile="auto"))
    alone = texts(backend, None, max_num_seqs=1)
    assert texts(backend, DRAFTERS[name](backend)) == alone
    assert texts(backend, None, max_num_batched_tokens=24, enable_prefix_caching=False) == alone


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no CUDA device")
def test_an_interpreted_backend_and_its_first_layers_compute_what_eager_ones_do():
    rows = [
        ForwardRow([3] * 4, 0, [1], 2),
        ForwardRow([5, 6, 7, 8], 0, [2], 4, [-1, -1, 1]),
        ForwardRow(list(range(20)), 0, [3, 4], 1),
    ]
    keys = noise.keys(range(5), range(5), noise.TARGET_STREAM, torch.device("cpu"))
    draws = Draws(torch.linspace(1.0, 0.5, 7).unsqueeze(-1), keys, torch.tensor([0, 1, 2, 3, 4, 5, 0]))
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    eager, backend = EagerBackend(model), make_cuda_backend(model, ModelConfig("tiny"))
    kv, other_kv = backend.allocate_kv(8, 16), eager.allocate_kv(8, 16)
    assert isinstance(kv, GraphedKV)
    backend.warm_up()  # with compile=off, nothing is compiled
    for (one, cache), (other, other_cache) in zip(
        [(backend, kv), backend.thin(1, kv)], [(eager, other_kv), eager.thin(1, other_kv)], strict=True
    ):
        output, expected = one.run(build(rows, cache), draws), other.run(build(rows, other_cache), draws)
        torch.testing.assert_close(output.scores, expected.scores, atol=1e-5, rtol=0)
        assert torch.equal(output.tokens, expected.tokens)
    backend.wait()
    assert not backend.is_busy


@pytest.mark.parametrize("invariant", [True, False])
def test_only_an_invariant_backend_gets_invariant_products(invariant, monkeypatch):
    made = []
    monkeypatch.setattr("engine.execution.cuda.cuda_backend.make_invariant", lambda *arguments: made.append(arguments))
    model = random_model("tiny", torch.device("cpu"), torch.bfloat16)
    make_cuda_backend(model, ModelConfig("tiny"), invariant=invariant)
    assert made == [(model.module, torch.bfloat16)] * invariant
