"""What a worker tells whoever started the application."""

import gc
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.transport import Connector
from cluster.workers.actors import TargetWorker, Worker, importing, show_progress
from cluster.workers.draft_worker import DraftWorker
from cluster.workers.features import FeatureSource
from engine.config import ModelConfig
from engine.drafting.model.feature_store import FeatureStore
from engine.models.loader import load_model
from engine.models.registry import open_model
from tests.cluster.fakes import verify_row
from tests.cluster.wire import NODE_ID
from tests.cluster.workers.test_features import StatesVerifier
from tests.models import save_llama
from tests.waiting import wait_for


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "cluster", "engine")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.mark.usefixtures("logging_as_before")
def test_a_worker_says_what_it_loaded_and_how_long_that_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig(str(save_llama(tmp_path / "model", seed=0)), dtype="float32", device="cpu")
    capsys.readouterr()  # what transformers says when it saves
    for log_format in ("text", "json"):
        show_progress(log_format)
        load_model(open_model(config))
    text, as_json = capsys.readouterr().err.splitlines()
    loaded = f"{config.path}: 0.0 M parameters in float32 on cpu, loaded in "
    assert text.startswith("INFO ")
    assert loaded in text
    assert json.loads(as_json)["levelname"] == "INFO"
    assert json.loads(as_json)["message"].startswith(loaded)


def test_what_is_imported_is_left_out_of_garbage_collections_which_go_on_afterwards():
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_worker_kills_the_process_in_which_it_runs(monkeypatch):
    killed = []
    monkeypatch.setattr("cluster.workers.actors.os.kill", lambda *call: killed.append(call))
    object.__new__(Worker).kill()
    assert killed == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize(
    ("world_size", "assigned", "visible", "index"),
    [
        (4, ["2"], None, 2),
        (4, ["5"], "4,5,6,7", 1),
        (4, ["GPU-b"], "GPU-a,GPU-b", 1),
        (4, [], None, None),
        (1, ["2"], None, None),
    ],
    ids=["a node's third", "of four that the node may use", "by names", "on a CPU", "one rank"],
)
def test_a_rank_that_sees_all_gpus_uses_the_one_that_ray_gave_it(world_size, assigned, visible, index, monkeypatch):
    """Ranks whose GPUs have the same index cannot share symmetric memory."""
    context, selected = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned}), []
    monkeypatch.setattr("cluster.workers.actors.ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("torch.cuda.set_device", selected.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker = object.__new__(Worker)
    worker._world_size = world_size
    worker._select_gpu()
    assert selected == ([] if index is None else [index])


@pytest.mark.parametrize("kind", [DraftWorker, TargetWorker])
def test_a_worker_prepares_the_thread_that_serves_and_a_target_closes_its_backend_after_any_end(kind):
    calls = []

    def serve(*_, **__):
        calls.append("serve")
        raise RuntimeError("the end")

    worker = object.__new__(kind)
    worker._server, worker._responder = SimpleNamespace(serve=serve, close=lambda: None), SimpleNamespace(work=None)
    worker._backend = SimpleNamespace(
        enter_thread=lambda: calls.append("enter_thread"), close=lambda: calls.append("close")
    )
    with pytest.raises(RuntimeError, match="the end"):
        worker.serve()
    assert calls == ["enter_thread", "serve", *(["close"] if kind is TargetWorker else [])]


async def test_rank_0_sends_features_to_the_draft_workers_newest_server():
    draft, store, verifier = object.__new__(DraftWorker), FeatureStore(0.0), StatesVerifier()
    draft._host, draft._node_id, draft._features, draft._feature_server = "127.0.0.1", NODE_ID, store, None
    lease = SimpleNamespace(version=4)
    for i in range(2):
        target = object.__new__(TargetWorker)
        target._source = FeatureSource(verifier, Connector(NODE_ID), version=1)
        target.send_features(draft.receive_features(lease, target.feature_identity()))
        await wait_for(lambda: target._source.has_room)  # noqa: B023
        await target._source.verify([verify_row(f"request {i}", [5])])
        target._source.work()
        await wait_for(lambda: store.take(f"4/request {i}", 1)[1])  # noqa: B023
    draft._feature_server.close()
