"""What a worker does around loading a model."""

from queue import Queue

import pytest

from cluster.workers import loading
from engine.config import EngineConfig, ModelConfig
from engine.execution.cpu.threads import Threads
from tests.cluster.models import save_llama


@pytest.mark.parametrize("role", ["draft", "target"])
def test_huge_pages_are_asked_for_once_all_is_loaded(role, monkeypatch, tmp_path):
    asked: Queue[str] = Queue()
    monkeypatch.setattr("engine.models.causal_lm._move_to_huge_pages", asked.put)
    monkeypatch.setattr(loading.ray, "get_runtime_context", lambda: Context())
    monkeypatch.setattr("engine.models.causal_lm.HUGE_PAGE_BYTES", 1)
    monkeypatch.setattr("engine.models.causal_lm._HUGE_PAGES_AFTER_S", 0.01)
    monkeypatch.setattr(loading, "count_cores", lambda _: 1)
    path = str(save_llama(tmp_path, seed=1))
    config, engine = ModelConfig(path, device="cpu"), EngineConfig(max_model_len=64)
    if role == "draft":
        loading.load_drafter(config, config, engine, run_ahead=False)
    else:
        loading.load_verifier(config, engine, shard=None)
    assert asked.get(timeout=10) == path


def test_threads_are_chosen_anew_when_a_compiled_pass_has_come(monkeypatch, tmp_path):
    two, one = Threads(((512, 2),) * 4), Threads(((512, 1),) * 4)
    choices = iter([two, one])
    monkeypatch.setattr(loading, "fit_threads", lambda *_, worth: next(choices))
    monkeypatch.setattr(loading.ray, "get_runtime_context", lambda: Context())
    monkeypatch.setattr(loading, "count_cores", lambda _: 2)
    config = ModelConfig(str(save_llama(tmp_path, seed=1)), device="cpu")
    model = loading._load(config)
    assert model.threads == two
    monkeypatch.setattr(model, "_try_to_adopt", lambda: setattr(model, "_compiled", object()))
    model._take_compiled()
    assert model.threads == one


class Context:
    """Of a worker, which is always on some node."""

    def get_node_id(self):
        return "a node"
