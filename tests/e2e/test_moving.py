"""Requests that wait move to a Router that has come, and off one that is stopped; their texts stay the same."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig
from tests.e2e.replicas import router_details, wait_until
from tests.e2e.servers import metrics, serve_on_ray, stream_text
from tests.models import save_model
from tests.waiting import wait_until as wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MAX_NUM_SEQS = 2
STEP = 10
NUM_TOKENS = 4000
FEW_TOKENS = 40
CONTEXT = 65_536
"""A stream as long as this outlasts the start of a Router many times over."""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_on_ray(2, {"RAY_SERVE_PROXY_USE_GRPC": "1"}) as url:
        yield url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return save_model(path, seed=1, layers=2, hidden=32, max_position_embeddings=CONTEXT)


def deploy(model: str, **settings: Any) -> None:
    """Deploy the model without a draft; return when all replicas run and those that they replace have ended."""
    common = {"draft_model": "none", "drafting": "none", "dtype": "float32", "compile": "off"}
    common |= {"num_blocks": 8192, "stream_interval_s": 0.5}
    serve.run(app(AppConfig.model_validate({"target_model": model, **common, **settings})))


def num_moved(url: str) -> float:
    return metrics(url).by("paceline:resubmissions_total", "reason").get(("moved",), 0.0)


async def until(url: str, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    await asyncio.to_thread(wait_for, lambda: metrics(url).total(name) == value, LIMIT_S)


@asynccontextmanager
async def long_stream(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    """Begin the longest stream that there can be, yield its lines, and leave."""
    body = {"prompt": "A", "max_tokens": CONTEXT - 8, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        yield lines


async def test_requests_that_wait_move_to_a_new_router(url, model):
    scaling = {"max_replicas": 2, "requests_per_replica": 4}
    await asyncio.to_thread(deploy, model, max_num_seqs=MAX_NUM_SEQS, autoscaling=scaling)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        tasks = [asyncio.create_task(stream_text(client, number % 2, NUM_TOKENS)) for number in range(STEP)]
        await wait_until(lambda _, running: running == 2, LIMIT_S)
        # No request is sent after the step: only requests that moved run at the second Router.
        await until(url, RUNNING, 2 * MAX_NUM_SEQS)
        assert 2 <= await asyncio.to_thread(num_moved, url) <= STEP / 2
        assert not all(task.done() for task in tasks)
        texts = await asyncio.gather(*tasks)
        assert len(set(texts[::2])) == len(set(texts[1::2])) == 1
        assert metrics(url).total(RUNNING) + metrics(url).total(WAITING) == 0


async def test_requests_that_wait_at_a_router_that_is_stopped_move_to_the_one_that_replaces_it(url, model):
    await asyncio.to_thread(deploy, model, max_num_seqs=1)
    seeds = (1, 2)  # fewer than are moved to a Router that has come while the other one goes on
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        expected = [await stream_text(client, seed, FEW_TOKENS) for seed in seeds]
        before = num_moved(url)
        async with long_stream(client) as lines:
            waiting = [asyncio.create_task(stream_text(client, seed, FEW_TOKENS)) for seed in seeds]
            await until(url, WAITING, len(seeds))
            rollout = asyncio.create_task(asyncio.to_thread(deploy, model, max_num_seqs=1, round_timeout_s=61))
            # The long stream has the only place of the old Router.
            async with asyncio.timeout(LIMIT_S):
                assert await asyncio.gather(*waiting) == expected
            assert await asyncio.to_thread(num_moved, url) - before == len(seeds)
            states = [replica["state"] for replica in (await router_details())["replicas"]]
            assert sorted(states) == ["RUNNING", "STOPPING"]
            assert await anext(lines) is not None
            assert not rollout.done()
        await asyncio.wait_for(rollout, LIMIT_S)
