"""The layers that use our product, which is interpreted on the CPU."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig
from engine.execution.batch import ForwardRow, build
from tests.engine.tiny import SIZES, model_of, save

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import linear
from engine.execution.cuda.compiled_layers import TritonContext
from engine.execution.cuda.cuda_backend import CudaBackend
from engine.execution.cuda.kernels import product
from engine.models.layers.experts import experts_of
from tests.engine.models.layers.test_quantization import layer_of
from tests.engine.tiny import EXPERTS, HEADS, LATENT


@pytest.fixture
def multiplied(monkeypatch):
    """The numbers of rows that the kernel has multiplied; cuBLAS agrees with it, and gives 7 to be known by."""
    counts, multiply = [], product.multiply
    monkeypatch.setattr(
        product, "multiply", lambda rows, *rest, **more: counts.append(len(rows)) or multiply(rows, *rest, **more)
    )
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_: True)
    monkeypatch.setattr(linear, "_cublas", lambda rows, weight: rows.new_full((len(rows), len(weight)), 7.0))
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda _: None)
    return counts


def test_every_linear_layer_is_replaced_and_cublas_is_asked_for_many_rows_only(multiplied, monkeypatch):
    """A layer of two parents stays one layer, as the last layer that a head shares with its target."""
    shared = nn.Linear(128, 16)
    module = nn.Sequential(shared, nn.Sequential(nn.Linear(16, 128)), shared).half()
    monkeypatch.setattr(linear, "MAX_KERNEL_ROWS", 8)
    expected = module(x := torch.randn(1, 9, 128, dtype=torch.float16))
    linear.make_invariant(module, torch.float16)
    assert {type(layer) for layer in module.modules() if isinstance(layer, nn.Linear)} == {linear.InvariantLinear}
    assert module[0] is module[2]
    with torch.inference_mode():
        torch.testing.assert_close(module(x[:, :8]), expected[:, :8], atol=0.02, rtol=0)
        assert multiplied == [8] * 3
        assert torch.equal(shared(x), 7.0 + shared.bias.expand(1, 9, -1))
        assert multiplied == [8] * 3
    floats = nn.Sequential(nn.Linear(8, 8))
    linear.make_invariant(floats, torch.float32)
    assert type(floats[0]) is nn.Linear, "in float32, no text hangs on rounding"


def test_cublas_is_told_to_sum_in_float32_and_without_splits(monkeypatch):
    libraries, matmul = [], torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    flags = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {flag: getattr(matmul, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(matmul, flag, (True, True))
        linear.sum_in_order()
        assert libraries == ["cublaslt"]
        assert torch._C._get_cublas_allow_bf16_reduced_precision_reduction() == (False, False)
        assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)
    finally:
        for flag, value in before.items():
            setattr(matmul, flag, value)


def test_cublas_must_give_the_kernels_bits_for_every_number_of_rows(monkeypatch, caplog):
    """Both are computed here by hand, and differ for some numbers of rows."""
    seen, wrong = {"kernel": [], "cublas": []}, {"kernel": (), "cublas": ()}

    def product_of(name, rows, weight):
        seen[name].append(len(rows))
        return rows[:, :1] * weight[:, 0] + (len(rows) in wrong[name])

    monkeypatch.setattr(product, "multiply", lambda rows, weight, _: product_of("kernel", rows, weight))
    monkeypatch.setattr(linear, "_cublas", lambda rows, weight: product_of("cublas", rows, weight))

    def ask(**failing):
        wrong.update({"kernel": (), "cublas": ()} | failing)
        linear.cublas_agrees.cache_clear()
        return linear.cublas_agrees(torch.Size((8, 4)), torch.float32, torch.device("cpu"))

    assert ask()
    assert seen == {"kernel": [8192, *linear._CHECKED_ROWS], "cublas": list(linear._CHECKED_ROWS[4:])}
    assert not any(ask(cublas=(count,)) for count in (65, 80, 160, 8192))
    assert caplog.text == ""
    ask(kernel=(320,))
    assert "unlike itself for [320] rows" in caplog.text
    monkeypatch.setattr(linear, "_MAX_CHECKED_NUMBERS", 8 * 640)
    assert ask(cublas=(8192,)), "no more numbers than there is room for"


@pytest.mark.parametrize(("num_bits", "groups", "zeros"), [(8, 1, False), (4, 4, False), (4, 4, True)])
def test_quantised_layers_are_multiplied_by_the_same_product_for_any_number_of_rows(
    num_bits, groups, zeros, multiplied
):
    layer, weight = layer_of(num_bits, groups=groups, outputs=40, inputs=128, zeros=zeros)
    module = nn.Sequential(layer.half())
    linear.make_invariant(module, torch.float16)
    x = torch.randn(1, 70, 128, dtype=torch.float16)
    with torch.inference_mode():
        result = module(x)
    torch.testing.assert_close(result.float(), x.float() @ weight.T + layer.bias.float(), atol=2.0, rtol=0.01)
    assert multiplied == [70]
    linear.make_invariant(module, torch.float16)
    assert module[0].values is layer.values, "a thinned model shares the layer"


def attend_to_one_token(context, layer, query, key, value, params):
    """Attention in contexts of one token, exactly: the interpreter takes seconds for what the kernel would do."""
    context.layers.append(layer)
    return value.repeat_interleave(len(query) // len(value), 0).transpose(0, 1).contiguous()


def test_logits_have_the_same_bits_beside_any_number_of_rows(tmp_path, monkeypatch):
    save(transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 1}), tmp_path, factor=3.0)
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_: False)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda _: None)
    monkeypatch.setattr(TritonContext, "attend", attend_to_one_token)
    model = model_of(tmp_path, dtype="float16")
    linear.make_invariant(model.module, model.dtype)
    backend, results = CudaBackend(model, ModelConfig("", compile="off"), EngineConfig()), []
    for count in (1, 5, 40):
        others = [ForwardRow([nth % 60], 0, [1 + nth], 1) for nth in range(1, count)]
        batch = build([ForwardRow([7], 0, [1], 1), *others], backend.allocate_kv(count + 1, 16))
        results.append(backend.run(batch).logits[0])
    for logits in results:
        assert torch.equal(logits, results[0])


@pytest.mark.parametrize(("family", "sizes"), [("GptOss", HEADS), ("DeepseekV3", LATENT)])
def test_routers_and_experts_are_computed_by_our_products(family, sizes, multiplied, monkeypatch):
    """The layer compiles as a whole, and a token's bits do not depend on the others."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | sizes | {"num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().requires_grad_(False)
    experts = experts_of(model)[0]
    block = next(parent for parent in model.modules() if experts in parent.children())
    x = torch.randn(1, 20, 32).half()
    with torch.inference_mode():
        expected = block(x)
        monkeypatch.setattr(linear, "cublas_agrees", lambda *_: False)
        linear.make_invariant(model, torch.float16)
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=True, backend="aot_eager")
        found = block(x)
        assert 20 in multiplied, "the router's"
        for output in (found, compiled(x)):
            torch.testing.assert_close(
                *((one[0] if type(one) is tuple else one) for one in (output, expected)), rtol=0.02, atol=0.02
            )
