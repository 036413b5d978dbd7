"""What a worker tells whoever started the application."""

from types import SimpleNamespace

import pytest

from cluster.transport import Connector
from cluster.workers.actors import TargetWorker, Worker
from cluster.workers.draft_worker import DraftWorker
from cluster.workers.features import FeatureSource
from engine.drafting.model.feature_store import FeatureStore
from tests.cluster.fakes import verify_row
from tests.cluster.wire import NODE_ID
from tests.cluster.workers.test_features import StatesVerifier
from tests.waiting import wait_for


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


@pytest.mark.parametrize("kind", [DraftWorker, TargetWorker])
def test_a_worker_prepares_the_thread_that_serves_and_a_target_closes_its_backend_after_any_end(kind):
    calls = []

    def serve(*_, **__):
        calls.append("serve")
        raise RuntimeError("the end")

    worker = object.__new__(kind)
    worker._server, worker._responder = SimpleNamespace(serve=serve, close=lambda: None), SimpleNamespace(work=None)
    worker._backends = [
        SimpleNamespace(enter_thread=lambda: calls.append("enter_thread"), close=lambda: calls.append("close"))
    ]
    with pytest.raises(RuntimeError, match="the end"):
        worker.serve()
    assert calls == ["enter_thread", "serve", *(["close"] if kind is TargetWorker else [])]
