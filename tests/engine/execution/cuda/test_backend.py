"""CudaBackend on a GPU: the eager pass's results, before and after it is warmed up."""

import pytest
import torch

from engine.config import ModelConfig
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.drafting.run_ahead.trees import RunAheadTreeDrafter
from engine.execution.eager import EagerBackend
from engine.sampling.params import SamplingParams
from tests.engine.running import make_engine, run
from tests.fakes import InterruptedDrafter, TreeDrafter
from tests.gpu.models import random_model

pytest.importorskip("triton", reason="the kernels need triton")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
from engine.execution.cuda.backend import CudaBackend

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
REQUESTS = [
    ([*range(3, 20 + i)], SamplingParams(temperature=0.5 * (i % 3), seed=i, max_tokens=40, ignore_eos=True))
    for i in range(6)
]
DRAFTERS = {
    "no draft": lambda _: None,
    "itself": lambda backend: lambda config: ModelDrafter(backend, config),
    "running ahead": lambda backend: lambda config: InterruptedDrafter(RunAheadDrafter(backend, config)),
    "trees": lambda _: lambda _config: TreeDrafter(range(2, 20)),
    "trees that grow on": lambda backend: lambda config: InterruptedDrafter(RunAheadTreeDrafter(backend, config)),
}


def texts(backend, drafter, **settings):
    engine = make_engine(backend, drafter, num_blocks=200, num_speculative_tokens=4, **settings)
    backend.warm_up()
    return run(engine, REQUESTS)


@pytest.fixture(scope="module")
def expected():
    return texts(EagerBackend(random_model("tiny", torch.device("cpu"), torch.float32)), None)


@pytest.mark.parametrize("is_compiled", ["off", "auto"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_float32_texts_are_those_of_a_cpu(name, is_compiled, expected):
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    model.module.to(DEVICE)
    model.device = DEVICE
    backend = CudaBackend(model, ModelConfig("tiny", compile=is_compiled))
    assert texts(backend, DRAFTERS[name](backend)) == expected


@pytest.mark.parametrize("name", DRAFTERS)
def test_bfloat16_texts_depend_on_neither_draft_nor_batch(name):
    backend = CudaBackend(random_model("tiny", DEVICE, torch.bfloat16), ModelConfig("tiny", compile="auto"))
    alone = texts(backend, None, max_num_seqs=1)
    assert texts(backend, DRAFTERS[name](backend)) == alone
    assert texts(backend, None, max_num_batched_tokens=24, enable_prefix_caching=False) == alone
