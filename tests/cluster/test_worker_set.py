"""Starting, watching and killing workers, with actors that are plain objects."""

import asyncio

import pytest
import ray

from cluster import worker_set
from cluster.config import GroupConfig
from cluster.worker_set import WorkerDiedError, WorkerSet, introduce
from cluster.workers.actors import WorkerProcess
from engine.config import CompileProgress, ModelConfig
from engine.errors import ModelError, TargetError


class Method:
    """An actor's method: `remote` returns something to wait for."""

    def __init__(self, function):
        self._function = function

    def remote(self, *arguments):
        async def run():
            return self._function(*arguments)

        return asyncio.ensure_future(run())


class FakeActor:
    def __init__(self, rank, node_id="node 1"):
        self.ended = asyncio.get_running_loop().create_future()
        self.begin = Method(lambda log_format: WorkerProcess(100 + rank, node_id))
        self.serve = self

    def remote(self):
        return self.ended


@pytest.fixture
async def workers():
    return WorkerSet("target rank", [FakeActor(0), FakeActor(1, "node 2")])


async def nothing_to_load():
    pass


CONFIG = GroupConfig(ModelConfig("target"))


class Ping:
    """An actor's method that answers so many times, the second time with an error, and is silent afterwards."""

    def __init__(self, num_answers, error=None):
        self.num_calls, self._num_answers, self._error = 0, num_answers, error

    async def remote(self, *_):
        self.num_calls += 1
        if self.num_calls == 2 and self._error is not None:
            raise self._error
        if self.num_calls > self._num_answers:
            await asyncio.Event().wait()
        return [CompileProgress(self.num_calls, 9, 2.0)]


@pytest.mark.parametrize("num_answers", [0, 3])
async def test_a_worker_that_answers_no_ping_while_it_loads_has_died(workers, monkeypatch, num_answers):
    monkeypatch.setattr(worker_set, "_PING_PERIOD_S", 0.0)
    workers.actors[0].ping, workers.actors[1].ping = Ping(10**9), Ping(num_answers)
    was_cancelled = asyncio.Event()

    async def load():
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    with pytest.raises(WorkerDiedError, match=r"hung while starting: it did not answer for 0\.05 s"):
        await workers.while_answering(0.05, load())
    assert workers.actors[1].ping.num_calls == num_answers + 1
    assert was_cancelled.is_set()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(None, "it stopped"), (ray.exceptions.RayActorError(error_msg="The actor died.\nThe stack:"), "The actor died.")],
)
async def test_the_end_of_any_worker_is_the_end_of_the_set(workers, error, reason):
    await workers.start(CONFIG, nothing_to_load)
    waiting = asyncio.create_task(workers.wait_for_end(10.0))
    await asyncio.sleep(0)
    if error is None:
        workers.actors[1].ended.set_result(None)
    else:
        workers.actors[1].ended.set_exception(error)
    assert await waiting == reason
    workers.actors[0].ended.cancel()


@pytest.mark.parametrize("error", [None, ray.exceptions.ActorUnavailableError("busy", None)])
async def test_a_worker_that_does_not_answer_a_ping_is_at_its_end(workers, monkeypatch, error):
    """An error is an answer of Ray, which tells later whether the worker has ended."""
    await workers.start(CONFIG, nothing_to_load)
    monkeypatch.setattr(worker_set, "_PING_PERIOD_S", 0.0)
    workers.actors[0].ping, workers.actors[1].ping = Ping(10**9), Ping(3, error)
    assert await workers.wait_for_end(0.01) == "it did not answer for 0.01 s"
    assert workers.actors[1].ping.num_calls == 4
    for actor in workers.actors:
        actor.ended.cancel()


@pytest.mark.parametrize(
    ("cause", "error", "message"),
    [
        (ModelError("no such model"), ModelError, "^no such model$"),
        (ValueError("wrong shape"), TargetError, r"a worker failed to start: ValueError\('wrong shape'\)"),
        (None, WorkerDiedError, "^a worker died while starting: The actor died.$"),
    ],
)
async def test_errors_of_ray_become_ours(cause, error, message):
    result = asyncio.get_running_loop().create_future()
    if cause is None:
        result.set_exception(ray.exceptions.RayActorError(error_msg="The actor died.\nThe stack:"))
    else:
        result.set_exception(ray.exceptions.RayTaskError("load", "traceback", cause))
    with pytest.raises(error, match=message):
        await worker_set.results([result])


FAILURE = ray.exceptions.RayTaskError("load", "traceback\nValueError: closed by peer", ValueError("closed by peer"))


async def test_a_rank_that_fails_because_another_was_killed_is_no_failure_of_its_own():
    failed, killed = (asyncio.get_running_loop().create_future() for _ in range(2))
    failed.set_exception(FAILURE)
    asyncio.get_running_loop().call_later(0.01, killed.set_exception, ray.exceptions.ActorDiedError())
    with pytest.raises(WorkerDiedError, match="died unexpectedly"):
        await worker_set.results([failed, killed])


@pytest.mark.parametrize(
    "error", [FAILURE, ray.exceptions.ActorDiedError(FAILURE)], ids=["raised by a method", "raised by the constructor"]
)
async def test_what_a_worker_raises_itself_is_no_death(error, monkeypatch):
    monkeypatch.setattr(worker_set, "_DEATH_NOTICE_S", 0.0)
    failed, loading = (asyncio.get_running_loop().create_future() for _ in range(2))
    failed.set_exception(error)
    with pytest.raises(TargetError, match="closed by peer") as caught:
        await worker_set.results([failed, loading])
    assert not isinstance(caught.value, WorkerDiedError)
    loading.cancel()


async def test_the_target_is_told_where_the_features_of_a_lease_go(workers, caplog):
    draft, calls = WorkerSet("draft worker", [FakeActor(7)]), []
    workers.actors[0].feature_identity = Method(lambda: "rank 0")
    draft.actors[0].receive_features = Method(lambda lease, identity: f"where {identity} connects for {lease}")
    workers.actors[0].send_features = Method(calls.append)
    await introduce(workers, draft, "lease 3")
    assert calls == ["where rank 0 connects for lease 3"]

    def die(*_):
        raise ray.exceptions.RayActorError

    draft.actors[0].receive_features = Method(die)
    await introduce(workers, draft, "lease 3")
    assert len(calls) == 1
    assert "drafts nothing" in caplog.text


async def test_a_worker_that_does_not_answer_after_its_start_has_died(workers, monkeypatch):
    monkeypatch.setattr(worker_set, "_FIRST_ANSWER_S", 0.01)
    workers.actors[1].begin = Ping(0)
    monkeypatch.setattr(worker_set.ray, "kill", lambda *_, **__: None)
    with pytest.raises(WorkerDiedError, match=r"did not answer within 0\.01 s of its start"):
        await workers.start(CONFIG, nothing_to_load)
