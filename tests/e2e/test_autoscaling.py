"""Replicas follow the load: real Serve, tiny models, more logical CPUs than cores. The tests share one service."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
import ray
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig, Autoscaling
from tests.e2e.replicas import router_details, routers, wait_until
from tests.e2e.servers import serve_on_ray, stream_text
from tests.models import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

DOWNSCALE_DELAY_S = 4.0
STREAM_TOKENS = 4000
DECIDED_WITHIN_S = 3.0
NUM_PROCESSES = 5
"""On the way of a request's load to a decision: this one, the proxy, Ingress, Router and Serve's controller."""
HEARTBEAT_S = 0.01
STEP = 12
"""Streams of a step in load: for three replicas of four each, of which the cluster has room for two."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    path = save_model(tmp_path_factory.mktemp("model"), seed=1, layers=2, hidden=32, max_position_embeddings=8192)
    return AppConfig(
        target_model=path,
        draft_model=path,
        served_model_name="tiny",
        dtype="float32",
        compile="off",
        speculation="fixed",
        num_speculative_tokens=1,
        num_blocks=8192,
        stream_interval_s=0.5,
        autoscaling=Autoscaling(max_replicas=3, requests_per_replica=4, downscale_delay_s=DOWNSCALE_DELAY_S),
    )


@pytest.fixture(scope="module")
def url(config: AppConfig) -> Iterator[str]:
    with serve_on_ray(2, {"RAY_SERVE_PROXY_USE_GRPC": "1"}) as url:
        serve.run(app(config))
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client


async def streams_per_router() -> list[int]:
    names = [replica["actor_name"] for replica in (await router_details())["replicas"] if replica["state"] == "RUNNING"]
    actors = [ray.get_actor(name, namespace="serve") for name in names]
    return list(await asyncio.gather(*(actor.get_num_ongoing_requests.remote() for actor in actors)))


@asynccontextmanager
async def load(
    client: httpx.AsyncClient, num_streams: int, seed: int | None = None
) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Have streams run until the block ends, with seeds of their own or with one; abandon those that still run then."""
    seeds = range(num_streams) if seed is None else [seed] * num_streams
    tasks = [asyncio.create_task(stream_text(client, seed, STREAM_TOKENS)) for seed in seeds]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Callable[[], float]]:
    """Yield a function that returns how late the processes may be, because other programs have the cores.

    It multiplies the longest delay of this process by their number.
    """
    late_s = 0.0

    async def beat() -> None:
        nonlocal late_s
        while True:
            due = time.monotonic() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            late_s = max(late_s, time.monotonic() - due)

    task = asyncio.create_task(beat())
    try:
        yield lambda: NUM_PROCESSES * late_s
    finally:
        task.cancel()


async def test_a_step_is_decided_on_within_3_seconds_and_the_service_goes_on_without_room(client, config, caplog):
    assert await routers() == (1, 1)
    async with heartbeat() as late_s, load(client, STEP):
        assert await wait_until(lambda target, _: target == 3) < DECIDED_WITHIN_S + late_s()
        await wait_until(lambda _, running: running == 2)
    response = await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 4})
    assert response.status_code == 200
    app(config)
    assert "autoscaling.max_replicas is 3, but the cluster has room for 2: no node has room for" in caplog.text


@pytest.mark.long
async def test_load_that_comes_and_goes_does_not_move_the_number_of_replicas(client):
    targets = set()
    async with load(client, STEP):
        await wait_until(lambda target, running: (target, running) == (3, 2))
    for num_streams in (0, STEP, 0):
        async with load(client, num_streams):
            until = time.monotonic() + DOWNSCALE_DELAY_S / 2
            while time.monotonic() < until:
                targets.add((await routers())[0])
    assert targets == {3}


async def test_scaling_down_cuts_no_stream(client):
    async with load(client, STEP):
        await wait_until(lambda _, running: running == 2)
    async with heartbeat() as late_s, load(client, 3, seed=1) as tasks:
        async with asyncio.timeout(60):
            while sorted(await streams_per_router()) != [1, 2]:
                await asyncio.sleep(0.05)
        assert await wait_until(lambda target, _: target == 1) < DOWNSCALE_DELAY_S + 3 + late_s()
        assert not any(task.done() for task in tasks), "streams must outlast the decision"
        assert len(set(await asyncio.gather(*tasks))) == 1, "the removed replica's streams have the text of the other's"
    await wait_until(lambda *numbers: numbers == (1, 1))
