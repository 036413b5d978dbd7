"""Decoder layers compiled on the CPU: one compilation for all layers and numbers of tokens, in every thread."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.models.causal_lm import forward

pytest.importorskip("triton", reason="the kernels need triton")
from triton import knobs

from engine.execution.cuda.compiled_layers import TritonContext, compile_layers, uncompile_layers
from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.tiny import model_of
from tests.gpu.models import SHAPES, random_model


def test_a_head_is_compiled_once_with_its_norms_and_those_that_it_calls_by_themselves(target_path, monkeypatch):
    """It is also a model beside its target; its norms are compiled alone, since it calls parts of its layers."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: functools.partial(forward))
    model = model_of(target_path)
    model = with_head(model, random_head(model, head_config(fc_norm=True)))
    compile_layers(model.module)
    forwards = {name: child.forward for name, child in model.module.named_modules() if "forward" in child.__dict__}
    norms = {"hidden_norm", "input_layernorm", "post_attention_layernorm"}
    assert {"lm.model.norm", "head.norm", "head.fc_norm.0", *(f"head.layers.0.{norm}" for norm in norms)} < {*forwards}
    assert "lm.model.layers.0.input_layernorm" not in forwards
    compile_layers(head_model(model).module)
    assert all(model.module.get_submodule(name).forward is forward for name, forward in forwards.items())


def computed(model, count, kv):
    batch = build([ForwardRow([3] * count, 0, [1, 2], 1)], kv)
    with torch.inference_mode(), TritonContext(kv, batch.paged.groups).current() as context:
        return forward(model.module, batch.token_ids, batch.positions, batch.logit_indices, context)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch's compiler
def test_layers_are_compiled_once_for_every_thread_and_compute_the_same(monkeypatch, preparation):
    """One thread loads and warms up, another serves 9 layers, more than torch compiles by itself, in two formats.

    Traced, and not compiled to code for a CPU: that takes minutes, and GPUs have other code.
    """
    compiler, seen = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *a, **k: seen.append(k) or compiler(*a, **k, backend="eager"))
    monkeypatch.setitem(SHAPES, "deep", (16, 32, 9, 2, 1, 16))
    torch._dynamo.reset()
    counters.clear()
    cpu, formats = torch.device("cpu"), (torch.float32, torch.float16)
    backends, others = ([EagerBackend(random_model("deep", cpu, dtype)) for dtype in formats] for _ in range(2))

    def load():
        for backend in backends:
            compile_layers(backend.model.module)
        with preparation.expected():
            computed(backends[0].model, 2, backends[0].allocate_kv(4, 16))

    def serve():
        for backend, other in zip(backends, others, strict=True):
            logits, expected = (computed(one.model, 5, one.allocate_kv(4, 16)) for one in (backend, other))
            torch.testing.assert_close(logits, expected, atol=1e-4 if backend is backends[0] else 0.02, rtol=0)
        return torch._dynamo.config.allow_unspec_int_on_nn_module, torch._dynamo.config.recompile_limit

    for step in (load, serve):
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(step).result()
    assert counters["stats"]["unique_graphs"] == 2 * 2, "the layers', and the final norm's"
    assert result == (True, 64)
    assert all(options["options"] == {"deterministic": True} and options["fullgraph"] for options in seen)
    assert preparation.counts["compiled"] == 2, "the other format, in a round"
    knobs.runtime.jit_post_compile_hook(fn="a kernel of ours")
    assert preparation.counts["compiled"] == 3
    uncompile_layers(backends[0].model.module)
    assert not any("forward" in child.__dict__ for child in backends[0].model.module.modules())
