"""What is served."""

import httpx

from deployments.config import AppConfig


async def test_what_is_served(client: httpx.AsyncClient, config: AppConfig) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", config.pair.target.path, 512)
    answer = (await client.get("/version")).json()
    assert answer["version"]
    assert answer["device"] == "auto"
