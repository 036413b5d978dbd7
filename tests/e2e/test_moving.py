"""Requests that wait when a second Router comes: they move to it, begin at once, and their texts stay the same."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig, Autoscaling
from tests.e2e.replicas import wait_until
from tests.e2e.servers import serve_on_ray
from tests.e2e.test_app import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MAX_NUM_SEQS = 2
STEP = 10
NUM_TOKENS = 4000
MOVED_WITHIN_S = 10.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    path = save_model(tmp_path, seed=1, layers=2, hidden=32, max_position_embeddings=8192)
    config = AppConfig(
        target_model=path,
        draft_model="none",
        drafting="none",
        dtype="float32",
        compile="off",
        num_blocks=8192,
        max_num_seqs=MAX_NUM_SEQS,
        stream_interval_s=0.5,
        autoscaling=Autoscaling(max_replicas=2, requests_per_replica=4),
    )
    with serve_on_ray(2, {"RAY_SERVE_PROXY_USE_GRPC": "1"}) as url:
        serve.run(app(config))
        yield url


async def metric(client: httpx.AsyncClient, pattern: str) -> float:
    """Return the sum of the samples whose lines match."""
    text = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


async def stream(client: httpx.AsyncClient, seed: int) -> tuple[str, float]:
    """Return the text of a whole stream, and how long its first token took."""
    body = {"prompt": "A", "max_tokens": NUM_TOKENS, "seed": seed, "ignore_eos": True, "stream": True}
    started, first_s, text = time.monotonic(), 0.0, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic() - started
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["text"]
    assert choice["finish_reason"] == "length"
    return text, first_s


async def test_requests_that_wait_move_to_a_new_router(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        tasks = [asyncio.create_task(stream(client, seed=number % 2)) for number in range(STEP)]
        await wait_until(lambda _, running: running == 2)
        # No request is sent after the step: only requests that moved run at the second Router.
        async with asyncio.timeout(MOVED_WITHIN_S):
            while await metric(client, r"vllm:num_requests_running{.*}") < 2 * MAX_NUM_SEQS:
                await asyncio.sleep(0.1)
        moved = await metric(client, r'paceline:resubmissions_total{.*reason="moved".*}')
        assert 2 <= moved <= STEP / 2
        assert not all(task.done() for task in tasks)
        texts, _ = zip(*await asyncio.gather(*tasks), strict=True)
        assert len(set(texts[::2])) == len(set(texts[1::2])) == 1
        assert await metric(client, r"vllm:num_requests_(?:running|waiting){.*}") == 0
