"""What a worker does around loading a model."""

from queue import Queue

import pytest

from cluster import loading
from engine.config import EngineConfig, ModelConfig
from tests.cluster.models import save_llama


@pytest.mark.parametrize("role", ["draft", "target"])
def test_huge_pages_are_asked_for_once_all_is_loaded(role, monkeypatch, tmp_path):
    asked: Queue[str] = Queue()
    monkeypatch.setattr("engine.model._move_to_huge_pages", asked.put)
    monkeypatch.setattr(loading.ray, "get_runtime_context", lambda: Context())
    monkeypatch.setattr("engine.model.HUGE_PAGE_BYTES", 1)
    monkeypatch.setattr("engine.model._HUGE_PAGES_AFTER_S", 0.01)
    monkeypatch.setattr(loading, "count_cores", lambda _: 1)
    path = str(save_llama(tmp_path, seed=1))
    config, engine = ModelConfig(path, device="cpu"), EngineConfig(max_model_len=64)
    if role == "draft":
        loading.load_drafter(config, config, engine, run_ahead=False)
    else:
        loading.load_verifier(config, engine, shard=None)
    assert asked.get(timeout=10) == path


class Context:
    """Of a worker, which is always on some node."""

    def get_node_id(self):
        return "a node"
