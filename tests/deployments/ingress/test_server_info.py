"""What is served, and whether it makes progress."""

import httpx

from deployments.config import AppConfig
from tests.deployments.fakes import Rig


async def test_what_is_served(client: httpx.AsyncClient, config: AppConfig) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", config.pair.target.path, 512)
    assert (await client.get("/health")).json() == {"status": "ok"}
    answer = (await client.get("/version")).json()
    assert answer["version"]
    assert answer["device"] == "auto"


async def test_health_is_503_without_progress(client: httpx.AsyncClient, rig: Rig) -> None:
    await rig.loop.stop()
    assert (await client.get("/health")).status_code == 503
