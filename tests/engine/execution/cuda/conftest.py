import pytest

from engine.stats import preparation as counts


@pytest.fixture
def preparation(monkeypatch):
    """The counts of this test alone."""
    from engine.execution.cuda import compiled_layers, cuda_backend, graphs

    counted = counts.Preparation()
    for module in (compiled_layers, cuda_backend, graphs):
        monkeypatch.setattr(module, "PREPARATION", counted)
    return counted


@pytest.fixture
def uncompiled(monkeypatch):
    """Layers are not compiled."""
    monkeypatch.setattr("engine.execution.cuda.cuda_backend.compile_layers", lambda _: None)


@pytest.fixture
def quick(monkeypatch):
    """Attention costs nothing, and means nothing; tokens are drawn without kernels, which threads cannot interpret."""
    from engine.execution.cuda.kernels import cache_write, draw_kernel, triton_attention

    monkeypatch.setattr(triton_attention, "attend", lambda _g, query, _k, _v, output, _p: output.fill_(query.mean()))
    monkeypatch.setattr(cache_write, "write", lambda *_: None)

    monkeypatch.setattr(draw_kernel, "draw", lambda logits, *_: logits.argmax(-1))
