"""Two Ingress replicas before two Routers with short queues: both fill, and what is too much is refused at once."""

import asyncio

import httpx
import pytest

from tests.e2e.replicated.conftest import MAX_NUM_SEQS, MAX_QUEUED, NUM_ROUTERS, PLAIN
from tests.e2e.servers import Server, metrics

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

CAPACITY = NUM_ROUTERS * (MAX_NUM_SEQS + MAX_QUEUED)
BODY = {"prompt": "A", "max_tokens": 30_000, "ignore_eos": True, "stream": True, **PLAIN}
RETRY_S = 0.2


async def queues(server: Server) -> tuple[float, float]:
    shown = await asyncio.to_thread(metrics, server.url)
    return shown.total("vllm:num_requests_running"), shown.total("vllm:num_requests_waiting")


async def stream(client: httpx.AsyncClient) -> None:
    """Send a request until it is admitted, and read its stream."""
    while True:
        async with client.stream("POST", "/v1/completions", json=BODY) as response:
            if response.status_code == 200:
                async for _ in response.aiter_bytes():
                    pass
                return
            assert response.status_code == 429
        await asyncio.sleep(RETRY_S)


async def test_both_routers_fill_evenly_and_what_is_too_much_is_refused(server):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(CAPACITY)]
        async with asyncio.timeout(180):  # the second Router may still be loading
            while await queues(server) != (NUM_ROUTERS * MAX_NUM_SEQS, NUM_ROUTERS * MAX_QUEUED):
                await asyncio.sleep(RETRY_S)
        refusals = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(40)))
        assert {response.status_code for response in refusals} == {429}
        assert all(1 <= int(response.headers["retry-after"]) <= 60 for response in refusals)
        assert not any(task.done() for task in streams), "streams must outlast the refusals"
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        async with asyncio.timeout(60):
            while await queues(server) != (0, 0):
                await asyncio.sleep(RETRY_S)
        assert (await client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2})).status_code == 200
    assert len(server.processes("Replica:default:Ingress")) == 2
    assert "Traceback" not in server.log.read_text()
