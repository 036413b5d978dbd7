"""Clients with different `cache_salt`s learn nothing of each other's prompts, over HTTP.

| mutant | caught by |
|---|---|
| the Ingress sends no salt, or the Router does not hand it on | test_a_salt_shares_cached_tokens_with_itself_only |
| `ResponsesRequest.to_chat` drops the salt | test_a_salt_shares_cached_tokens_with_itself_only |
| a request that goes on elsewhere loses its salt | test_a_request_that_goes_on_elsewhere_keeps_its_salt |
| all salts are alike | test_the_first_token_of_another_salt_takes_as_long_as_of_a_new_prompt |
| the client's `x-request-id` names the request in the engine | test_a_clients_request_id_names_nothing_in_the_engine |
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.ingress.lasting_outputs import LastingOutputs
from deployments.router.generation import WithdrawnError
from engine.protocols import Verdict, Verifier, VerifyRow
from engine.sequence import RequestOutput
from tests.deployments.fakes import LocalRouters, Rig, generation
from tests.deployments.serving import serving

TEXT = "The same long words, sent by everybody who is here. " * 4
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
}
TOKEN_S = 0.0005


class CountingVerifier:
    """Passes rounds on, counts the tokens that they compute, and takes some time for each if told to."""

    def __init__(self, verifier: Verifier, token_s: float = 0.0) -> None:
        self._verifier = verifier
        self._token_s = token_s
        self.num_computed = 0

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        num_tokens = sum(row.length for row in rows)
        self.num_computed += num_tokens
        await asyncio.sleep(num_tokens * self._token_s)
        return await self._verifier.verify(rows)

    def release(self, request_id: str) -> None:
        self._verifier.release(request_id)


def with_salt(body: dict[str, Any], salt: str | None) -> dict[str, Any]:
    return body if salt is None else body | {"cache_salt": salt}


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    """The prompt's tokens, and how many of them were cached."""
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_salt_shares_cached_tokens_with_itself_only(client: httpx.AsyncClient, rig: Rig, path: str) -> None:
    verifier = CountingVerifier(rig.engine.verifier)
    rig.engine.verifier = verifier
    seen = []
    for salt in (None, "a", "b", "a", None, "b"):
        before = verifier.num_computed
        response = await client.post(path, json=with_salt(ENDPOINTS[path], salt))
        num_prompt_tokens, num_cached = counts(response.json()["usage"])
        seen.append(num_cached)
        assert verifier.num_computed - before == num_prompt_tokens - num_cached
    in_full_blocks = (num_prompt_tokens - 1) // 16 * 16
    assert seen == [0, 0, 0, *[in_full_blocks] * 3]


def test_the_first_token_of_another_salt_takes_as_long_as_of_a_new_prompt(config: AppConfig, model_dir: Path) -> None:
    body = ENDPOINTS["/v1/completions"] | {"stream": True}
    with serving(config, model_dir) as (url, rig), httpx.Client(base_url=url) as client:
        rig.engine.verifier = CountingVerifier(rig.engine.verifier, TOKEN_S)

        def first_token_s(salt: str) -> float:
            started = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=with_salt(body, salt)) as response:
                chunk = json.loads(next(response.iter_lines()).removeprefix("data: "))
                assert chunk["choices"][0]["text"]
            return time.perf_counter() - started

        first_token_s("a")
        computing_s = TOKEN_S * len(TEXT)  # a token per letter
        assert all(first_token_s(salt) >= computing_s for salt in ("b", "c", "d"))


class _WithdrawnOnce:
    """The way to Routers of which the first gives the request back."""

    def __init__(self, routers: LocalRouters) -> None:
        self._routers = routers
        self.salts: list[str | None] = []

    def __call__(self, request: Any) -> Any:
        self.salts.append(request.cache_salt)
        return _Withdrawn() if len(self.salts) == 1 else self._routers.generate(request)


class _Withdrawn:
    refused_by: str | None = None

    async def next(self) -> list[RequestOutput]:
        raise WithdrawnError("another Router has less to do")

    async def close(self) -> None:
        pass


async def test_a_request_that_goes_on_elsewhere_keeps_its_salt(routers: LocalRouters) -> None:
    submit = _WithdrawnOnce(routers)
    outputs = LastingOutputs(replace(generation(), cache_salt="a"), submit, lambda _: None, lambda _: True)
    while await outputs.next():
        pass
    assert submit.salts == ["a", "a"]


async def test_a_clients_request_id_names_nothing_in_the_engine(
    client: httpx.AsyncClient, routers: LocalRouters
) -> None:
    ids = []
    for _ in range(2):
        response = await client.post(
            "/v1/completions", json=ENDPOINTS["/v1/completions"], headers={"x-request-id": "mine"}
        )
        assert response.headers["x-request-id"] == "mine"
        assert routers.last is not None
        ids.append(routers.last.request_id)
    assert len(set(ids)) == 2
    assert not any("mine" in request_id for request_id in ids)
