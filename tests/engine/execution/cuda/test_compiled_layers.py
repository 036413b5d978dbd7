"""Decoder layers compiled on the CPU: one compilation for all layers and numbers of tokens."""

import functools

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import forward

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.compiled_layers import TritonContext, compile_layers, uncompile_layers
from tests.gpu.models import random_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch's compiler
@torch.inference_mode()
def test_layers_are_compiled_once_and_compute_the_same(monkeypatch):
    """Traced, and not compiled to code for a CPU: that takes minutes, and GPUs have other code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    backend = EagerBackend(random_model("tiny", torch.device("cpu"), torch.float32))
    kv, other_kv = backend.allocate_kv(20, 16), backend.allocate_kv(20, 16)
    torch._dynamo.reset()
    counters.clear()
    compile_layers(backend.model.module)
    try:
        for count in (2, 5, 9):
            rows = [ForwardRow([3] * count, 0, [1, 2], count)]
            batch = build(rows, kv)
            with TritonContext(kv, batch.paged.groups).current() as context:
                logits = forward(
                    backend.model.module, batch.token_ids, batch.positions, batch.logit_indices, context
                ).float()
            uncompiled = EagerBackend(random_model("tiny", torch.device("cpu"), torch.float32))
            torch.testing.assert_close(logits, uncompiled.logits(build(rows, other_kv)), atol=1e-4, rtol=0)
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        uncompile_layers(backend.model.module)
