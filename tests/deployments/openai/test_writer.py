"""The contract with the official client, sync and async: each endpoint whole, in a stream, and refused.

The sync client speaks real HTTP to the application on a port; the async one calls it in this process.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.config import AppConfig
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.serving import serving

USER: Any = [{"role": "user", "content": "hello"}]
COMPLETION: Any = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 6}
CHAT: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_completion_tokens": 6}
RESPONSE: Any = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}
BAD = 101


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[str]:
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny")
    with serving(config, model_dir) as (url, _):
        yield url


@pytest.fixture(scope="module")
def sync(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


# --- Sync -----------------------------------------------------------------------------------------------------------


def test_completions(sync: openai.OpenAI) -> None:
    whole = sync.completions.create(**COMPLETION, logprobs=1, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert all(len(choice.text) == 6 and choice.finish_reason == "length" for choice in whole.choices)
    assert all(choice.logprobs and len(choice.logprobs.tokens or []) == 6 for choice in whole.choices)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12)
    chunks = list(sync.completions.create(**COMPLETION, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.completion_tokens) == ([], 6)


def test_chat(sync: openai.OpenAI) -> None:
    whole = sync.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0]
    assert whole.message.role == "assistant"
    assert len(whole.message.content or "") == 6
    assert whole.logprobs is not None
    assert len(whole.logprobs.content or []) == 6
    chunks = list(sync.chat.completions.create(**CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_responses(sync: openai.OpenAI) -> None:
    whole = sync.responses.create(**RESPONSE)
    assert len(whole.output_text) == 6
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 6
    events = list(sync.responses.create(**RESPONSE, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"


def test_models(sync: openai.OpenAI) -> None:
    (model,) = sync.models.list().data
    assert model.id == "tiny"
    assert (model.model_extra or {})["max_model_len"] == 512


@pytest.mark.parametrize("stream", [False, True])
def test_errors(sync: openai.OpenAI, stream: bool) -> None:
    for call, options in (
        (sync.completions.create, COMPLETION),
        (sync.chat.completions.create, CHAT),
        (sync.responses.create, RESPONSE),
    ):
        create: Any = call
        with pytest.raises(openai.BadRequestError) as bad:
            create(**{**options, "temperature": BAD}, stream=stream)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            create(**{**options, "model": "other"}, stream=stream)
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


# --- Async ----------------------------------------------------------------------------------------------------------


async def test_async_completions(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.completions.create(**COMPLETION)
    stream = await sdk.completions.create(**COMPLETION, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason == "length"


async def test_async_chat(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(**CHAT)
    stream = await sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


async def test_async_responses(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.responses.create(**RESPONSE)
    async with sdk.responses.stream(**RESPONSE) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


async def test_async_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tiny"]


@pytest.mark.parametrize("stream", [False, True])
async def test_async_errors(sdk: openai.AsyncOpenAI, stream: bool) -> None:
    calls: Any = (
        (sdk.completions.create, COMPLETION),
        (sdk.chat.completions.create, CHAT),
        (sdk.responses.create, RESPONSE),
    )
    for create, options in calls:
        with pytest.raises(openai.BadRequestError) as bad:
            await create(**{**options, "temperature": BAD}, stream=stream)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await create(**{**options, "model": "other"}, stream=stream)


@pytest.fixture
async def closed(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        yield client


async def test_async_keys(closed: httpx.AsyncClient) -> None:
    for key, is_known in (("right", True), ("wrong", False)):
        sdk = openai.AsyncOpenAI(base_url="http://paceline/v1", api_key=key, http_client=closed, max_retries=0)
        if is_known:
            assert (await sdk.completions.create(**COMPLETION)).choices
        else:
            with pytest.raises(openai.AuthenticationError):
                await sdk.completions.create(**COMPLETION)
