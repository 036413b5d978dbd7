"""A changed configuration, draft or target under a client that never stops: no request fails, and no text changes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.config import AppConfig
from deployments.local.environment import serve_environment
from tests.e2e.replicas import application
from tests.e2e.servers import serve_on_ray, stream_choices
from tests.models import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

NAME = "paceline"
NUM_CLIENTS = 2
NUM_SEEDS = 6
LONG_SEED = 99
LONG_TOKENS = 1000
"""One stream after another is as long, so that replicas are stopped in the middle of one."""
ROLLOUT_S = 120.0


class Service:
    """The application on a Ray cluster of its own, deployed by a config file's contents."""

    def __init__(self, url: str, arguments: dict[str, Any]) -> None:
        self.url = url
        self._port = int(url.rpartition(":")[2])
        self._arguments = arguments

    async def deploy(self, **changes: Any) -> set[str]:
        """Change some arguments; return the deployments that got new replicas, when all of them run."""
        before = await self._replicas()
        self._arguments |= changes
        ours = {"name": NAME, "route_prefix": "/", "import_path": "deployments:app", "args": self._arguments}
        schema = ServeDeploySchema.model_validate({"http_options": {"port": self._port}, "applications": [ours]})
        client = _get_global_client()
        assert client is not None
        await asyncio.to_thread(client.deploy_apps, schema, _blocking=False)
        started = time.time()
        async with asyncio.timeout(ROLLOUT_S):
            while not await self._is_settled(started):
                await asyncio.sleep(0.1)
        after = await self._replicas()
        return {name for name in after if after[name].isdisjoint(before.get(name, set()))}

    async def _is_settled(self, since: float) -> bool:
        deployed = await application(NAME)
        return deployed.get("last_deployed_time_s", 0) >= since - 1 and deployed.get("status") == "RUNNING"

    async def _replicas(self) -> dict[str, set[str]]:
        return {
            name: {replica["replica_id"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"}
            for name, deployment in (await application(NAME)).get("deployments", {}).items()
        }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    size = {"max_position_embeddings": 4096}
    return {
        "target": save_model(tmp_path_factory.mktemp("target"), seed=1, layers=2, hidden=32, **size),
        "draft": save_model(tmp_path_factory.mktemp("draft"), seed=2, layers=1, hidden=16, **size),
        "other target": save_model(tmp_path_factory.mktemp("new"), seed=4, layers=2, hidden=32, **size),
        "other draft": save_model(tmp_path_factory.mktemp("other"), seed=3, layers=1, hidden=16, **size),
    }


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, models: dict[str, str]) -> Iterator[Service]:
    with serve_on_ray(request.param, serve_environment(AppConfig())) as url:
        arguments = {
            "target_model": models["target"],
            "draft_model": models["draft"],
            "served_model_name": "tiny",
            "dtype": "float32",
            "compile": "off",
            "speculation": "fixed",
            "num_speculative_tokens": 2,
        }
        service = Service(url, arguments)
        asyncio.run(service.deploy())
        yield service


def body(seed: int, *, stream: bool, max_tokens: int = 24) -> dict[str, Any]:
    request = {"prompt": "A", "max_tokens": max_tokens, "temperature": 0.8, "seed": seed, "ignore_eos": True}
    return request | {"stream": stream, "n": 2 if max_tokens == 24 else 1}


async def complete(client: httpx.AsyncClient, seed: int, *, stream: bool, max_tokens: int = 24) -> list[str]:
    """Return the texts of a request; an HTTP error, an error event or a cut connection fails."""
    sent = body(seed, stream=stream, max_tokens=max_tokens)
    if not stream:
        response = await client.post("/v1/completions", json=sent)
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]
    texts = [""] * int(sent["n"])
    for choice in await stream_choices(client, sent):
        texts[choice["index"]] += choice["text"]
    return texts


@asynccontextmanager
async def clients_that_never_stop(client: httpx.AsyncClient) -> AsyncIterator[dict[int, set[tuple[str, ...]]]]:
    """Send requests until the block ends; yields the texts by seed. Any failure is raised at the end."""
    texts: dict[int, set[tuple[str, ...]]] = {seed: set() for seed in (*range(NUM_SEEDS), LONG_SEED)}
    must_stop = asyncio.Event()

    async def run(number: int) -> None:
        count = number
        while not must_stop.is_set():
            count += 1
            seed = count % NUM_SEEDS
            texts[seed].add(tuple(await complete(client, seed, stream=bool(count // NUM_SEEDS % 2))))

    async def run_long() -> None:
        while not must_stop.is_set():
            texts[LONG_SEED].add(tuple(await complete(client, LONG_SEED, stream=True, max_tokens=LONG_TOKENS)))

    async with asyncio.TaskGroup() as group:
        group.create_task(run_long())
        for number in range(NUM_CLIENTS):
            group.create_task(run(number))
        while not all(texts.values()):
            await asyncio.sleep(0.1)
        try:
            yield texts
        finally:
            must_stop.set()


@pytest.mark.parametrize(
    ("service", "change", "restarted"),
    [
        (2, {"num_speculative_tokens": 3}, {"Router"}),
        (2, {"limits": {"max_n": 4}}, {"Ingress"}),
        (2, {"target_model": "other target"}, {"Router", "Ingress"}),
        (1, {"draft_model": "other draft"}, {"Router"}),
    ],
    ids=["a Router setting", "an Ingress setting", "the target", "the draft, without room for a second Router"],
    indirect=["service"],
)
async def test_no_request_fails_and_no_text_changes(service, models, change, restarted):
    change = {name: models.get(value, value) if isinstance(value, str) else value for name, value in change.items()}
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=ROLLOUT_S) as client,
        clients_that_never_stop(client) as texts,
    ):
        before = {seed: set(versions) for seed, versions in texts.items()}
        assert await service.deploy(**change) == restarted
        for seed in range(NUM_SEEDS):
            texts[seed].add(tuple(await complete(client, seed, stream=False)))
    num_texts = 2 if "target_model" in change else 1  # those of the old target, and those of the new one
    assert all(len(versions) == 1 for versions in before.values())
    assert all(len(versions) <= num_texts for versions in texts.values())
    assert all(len(texts[seed]) == num_texts for seed in range(NUM_SEEDS))
