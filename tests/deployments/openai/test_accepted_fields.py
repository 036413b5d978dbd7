"""Fields that clients send: each through the official client, with the meaning that its description gives."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

import deployments.ingress.ingress  # noqa: F401  # imports every request
from deployments.openai.conversation_fields import AssistantMessage
from deployments.openai.types import IGNORED, RequestModel
from tests.deployments.fakes import LocalRouters
from tests.deployments.openai.clients import CLIENTS, USER

COMPLETION: Any = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 6}
CHAT: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 6}
RESPONSE: Any = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}
EVERYWHERE: Any = {
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": True,
    "user": "u",
    "metadata": {"a": "b"},
}


def test_every_ignored_field_belongs_to_a_class_which_describes_it() -> None:
    classes = {cls.__name__: cls for cls in subclasses(RequestModel)}
    for why, row in IGNORED.items():
        for names, owners in row.items():
            for name, owner in itertools.product(names.split(), owners.split()):
                described = classes[owner].model_json_schema()
                described = described.get("properties") or described["$defs"][owner]["properties"]
                assert described[name]["description"] == f"Accepted and ignored: {why}."


def subclasses(cls: type) -> Iterator[type[RequestModel]]:
    for below in cls.__subclasses__():
        yield below
        yield from subclasses(below)


NO_CHANGE: dict[str, tuple[str, Any, Any]] = {
    **CLIENTS,
    "ignored in completions": ("/v1/completions", COMPLETION, EVERYWHERE),
    "ignored in chats": ("/v1/chat/completions", CHAT, {**EVERYWHERE, "verbosity": "low"}),
    "ignored in responses": (
        "/v1/responses",
        RESPONSE,
        {**EVERYWHERE, "max_tool_calls": 3, "text": {"verbosity": "high"}, "reasoning": {"summary": "auto"}}
        | {"include": ["reasoning.encrypted_content"]},
    ),
    "nothing in completions": (
        "/v1/completions",
        COMPLETION,
        {"stop": "", "suffix": "", "stream_options": None, "logit_bias": {}, "stop_token_ids": []},
    ),
    "nothing in chats": (
        "/v1/chat/completions",
        CHAT,
        {"tools": [], "stop": [], "functions": [], "documents": [], "bad_words": [], "tool_choice": "auto"},
    ),
    "nothing in responses": (
        "/v1/responses",
        RESPONSE,
        {"tools": [], "include": [], "tool_choice": "auto", "truncation": "disabled", "background": False},
    ),
}


@pytest.mark.parametrize("name", NO_CHANGE)
async def test_what_clients_send_besides_changes_no_prompt(
    client: httpx.AsyncClient, routers: LocalRouters, name: str
) -> None:
    path, body, more = NO_CHANGE[name]
    seen = []
    for sent in (body, {**body, **more}):
        response = await client.post(path, json={"temperature": 0, **sent})
        assert response.status_code == 200, response.text
        seen.append((routers.last.prompts, routers.last.params))
    assert seen[0] == seen[1]


def test_thoughts_have_two_names() -> None:
    for names, thoughts in (({"reasoning": "b"}, "b"), ({"reasoning": "b", "reasoning_content": "c"}, "c"), ({}, None)):
        assert AssistantMessage(role="assistant", content="a", **names).thoughts == thoughts


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_priority_reaches_the_router(client: httpx.AsyncClient, routers: LocalRouters, path: str) -> None:
    body = {"prompt": "abc"} if path == "/v1/completions" else {"messages": USER}
    body = {"input": "abc"} if path == "/v1/responses" else {**body, "max_tokens": 2}
    for sent, expected in ((None, 0), (-3, -3), (7.0, 7)):
        response = await client.post(path, json={**body, "priority": sent})
        assert response.status_code == 200, response.text
        assert routers.last.priority == expected
    response = await client.post(path, json={**body, "priority": 2**31})
    assert response.status_code == 400
    assert "priority" in response.text


async def test_a_whole_number_may_be_written_with_a_point(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    body = {"prompt": [97.0, 98], "max_tokens": 4.0, "seed": 3.0, "top_k": 5.0, "n": 2.0, "logprobs": 1.0}
    response = await client.post("/v1/completions", json={**body, "stop_token_ids": [7.0], "min_tokens": 2.0})
    assert response.status_code == 200, response.text
    params = routers.last.params
    assert routers.last.prompts == [[97, 98]]
    numbers = (params.max_tokens, params.seed, params.top_k, params.n, params.logprobs, params.min_tokens)
    assert numbers == (4, 3, 5, 2, 1, 2)
    assert all(isinstance(number, int) for number in numbers)
    response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4.5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_no_text_is_the_beginning_of_a_document(sdk: openai.AsyncOpenAI, routers: LocalRouters) -> None:
    for prompt in ("", ["", "a"]):
        await sdk.completions.create(**{**COMPLETION, "prompt": prompt})
        assert routers.last.prompts[0] == [256]  # the end of the document before it
    with pytest.raises(openai.BadRequestError) as error:
        await sdk.completions.create(**{**COMPLETION, "prompt": ""}, extra_body={"add_special_tokens": False})
    assert error.value.param == "prompt"


@pytest.mark.parametrize(("keep", "max_tokens", "kept"), [(2, 6, 2), (600, 6, None), (0, 6, None), (-1, 6, 506)])
async def test_the_last_tokens_of_a_prompt_are_kept(
    client: httpx.AsyncClient, routers: LocalRouters, keep: int, max_tokens: int, kept: int | None
) -> None:
    prompt = [65 + i % 26 for i in range(512)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "truncate_prompt_tokens": keep}
    response = await client.post("/v1/completions", json=body)
    if kept is None:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
        return
    assert response.status_code == 200, response.text
    assert routers.last.prompts == [prompt[-kept:]]
    assert response.json()["usage"]["prompt_tokens"] == kept
    await client.post("/v1/completions", json={**body, "truncation_side": "right"})
    assert routers.last.prompts == [prompt[:kept]]


async def test_a_conversation_is_cut_from_its_beginning(sdk: openai.AsyncOpenAI, routers: LocalRouters) -> None:
    await sdk.chat.completions.create(**CHAT)
    whole = routers.last.prompts[0]
    await sdk.chat.completions.create(**CHAT, extra_body={"truncate_prompt_tokens": 5})
    assert routers.last.prompts == [whole[-5:]]
    await sdk.chat.completions.create(**CHAT, extra_body={"truncate_prompt_tokens": -1})
    assert routers.last.prompts == [whole]


async def test_answers_name_what_computed_them(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(**CHAT)
    assert whole.system_fingerprint
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**CHAT, stream=True)]
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert (await sdk.completions.create(**COMPLETION)).system_fingerprint == whole.system_fingerprint


async def test_the_prompts_log_probabilities_come_in_vllms_form(
    sdk: openai.AsyncOpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = [str(token) for token in tokenizer.encode("abc")]
    completion = await sdk.completions.create(**COMPLETION, extra_body={"prompt_logprobs": 2})
    chat = await sdk.chat.completions.create(**CHAT, extra_body={"prompt_logprobs": 2})
    scores = (completion.choices[0].model_extra or {})["prompt_logprobs"]
    assert len(scores) == 3
    for first, *rest in (scores, (chat.model_extra or {})["prompt_logprobs"]):
        assert first is None
        for position in rest:
            assert 2 <= len(position) <= 3
            assert {entry["rank"] for entry in position.values()} >= {1, 2}
            by_rank = sorted(position.values(), key=lambda entry: entry["rank"])
            logprobs = [entry["logprob"] for entry in by_rank]
            assert logprobs == sorted(logprobs, reverse=True)
    assert [scores[i][ids[i]]["decoded_token"] for i in (1, 2)] == ["b", "c"]
    echoed = await sdk.completions.create(**COMPLETION, echo=True, logprobs=1, extra_body={"prompt_logprobs": 2})
    shown = echoed.choices[0].logprobs
    assert (echoed.choices[0].model_extra or {})["prompt_logprobs"] == scores
    assert shown.token_logprobs[1:3] == [scores[i][ids[i]]["logprob"] for i in (1, 2)]
    assert all(len(top) <= 2 for top in shown.top_logprobs if top)
    none = await sdk.completions.create(**COMPLETION, extra_body={"prompt_logprobs": 0})
    assert [len(position) for position in (none.choices[0].model_extra or {})["prompt_logprobs"][1:]] == [1, 1]
