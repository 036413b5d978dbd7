"""Clients with different `cache_salt`s learn nothing of each other's prompts, over HTTP."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.routing import resumable_stream
from engine.errors import TargetError
from engine.protocols import Verdict, Verifier, VerifyRow
from tests.deployments.fakes import Rig, generation
from tests.deployments.routing.test_resumable_stream import LAST, Routers

TEXT = "The same long words, sent by everybody who is here. " * 4
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
}


class CountingVerifier:
    """Passes rounds on, and counts the tokens that they compute."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.num_computed = 0

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        self.num_computed += sum(row.length for row in rows)
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


async def test_a_request_that_another_router_resumes_keeps_its_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_stream, "FIRST_PAUSE_S", 0.0)
    routers = Routers([TargetError("lost")], [[LAST]])
    assert await routers.open(replace(generation(), cache_salt="a")).next() == [LAST]
    assert [request.cache_salt for request in routers.submitted] == ["a", "a"]
