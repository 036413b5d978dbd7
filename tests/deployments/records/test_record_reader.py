"""Audits over the API: an answer passes however it was asked for, and no falsified token or changed field does."""

import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig
from tests.deployments.requests import events
from tests.deployments.templates import HERMES, save_tokenizer
from tests.deployments.thinking import BIAS, ONE

HOT = {"temperature": 3.0, "max_tokens": 24, "seed": 7}
"""So hot that the model's tokens depend on the noise."""
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": ONE}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {}),
    (TEXT, {"seed": None}),
    (TEXT, {"prompt": ["abc", [100, 101], "de"][::2], "n": 2}),
    (TEXT, {"prompt": ["abc", "abc"], "seed": None}),
    (TEXT, {"temperature": 0}),
    (TEXT, {"top_p": 0.9, "top_k": 40, "min_p": 0.001, "logprobs": 2}),
    (TEXT, {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    (TEXT, {"logit_bias": {"50": 9.0, "60": -100}, "min_tokens": 20, "stop_token_ids": [70, 71, 72]}),
    (TEXT, {"stop": ["K", "a", "5"], "max_tokens": 300}),
    (TEXT, {"stop": ["K", "a"], "include_stop_str_in_output": True, "max_tokens": 300}),
    (TEXT, {"stop_token_ids": [*range(40, 60)], "max_tokens": 300}),
    (TEXT, {"prediction": {"type": "content", "content": "abcabc"}}),
    (TEXT, {"echo": True, "logprobs": 1}),
    (TEXT, {"structured_outputs": {"regex": "[a-z]{4,8}"}}),
    (TEXT, {"speculative": {"enabled": False}, "priority": 3, "user": "u", "best_of": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"n": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
]


async def recorded(client: httpx.AsyncClient, path: str = TEXT, **fields: Any) -> dict[str, Any]:
    """The record of an answer."""
    body = {("messages" if path == CHAT else "prompt"): USER if path == CHAT else "abc", **HOT, **fields}
    body["speculative"] = body.get("speculative", {}) | {"record": True}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    record: dict[str, Any] = response.json()["record"]
    return record


async def audited(client: httpx.AsyncClient, record: dict[str, Any]) -> list[dict[str, Any]]:
    """What the audit says of each choice."""
    response = await client.post("/v1/audit", json=record)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def is_equal(choices: list[dict[str, Any]]) -> bool:
    return not any(choice["differences"] or choice["problems"] or choice["logprobs_apart"] > 1e-3 for choice in choices)


@pytest.fixture
async def client(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    save_tokenizer(HERMES, tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


@pytest.mark.parametrize(("path", "fields"), ASKED, ids=[json.dumps(fields) for _, fields in ASKED])
async def test_an_answer_passes_however_it_was_asked_for(client: httpx.AsyncClient, path: str, fields: Any) -> None:
    record = await recorded(client, path, **fields)
    choices = await audited(client, record)
    assert is_equal(choices), choices
    assert [choice["num_tokens"] for choice in choices] == [len(each["token_ids"]) for each in record["choices"]]
    falsified = copy.deepcopy(record)
    ids = falsified["choices"][-1]["token_ids"]
    ids[len(ids) // 2] = 33 + (ids[len(ids) // 2] + 1) % 60
    assert not is_equal(await audited(client, falsified))


async def test_a_stream_ends_with_the_record_of_the_whole_answer(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "abc", **HOT, "ignore_eos": None, "speculative": {"record": True}}
    *_, last = await events(client, TEXT, **asked)
    whole = (await client.post(TEXT, json=asked)).json()
    assert last["record"]["choices"] == whole["record"]["choices"]
    assert last["record"]["choices"][0]["text"] == whole["choices"][0]["text"]
    assert is_equal(await audited(client, last["record"]))


async def test_thoughts_before_a_grammar_pass(thinking: httpx.AsyncClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}
    record = await recorded(thinking, CHAT, response_format=schema, logit_bias=BIAS, temperature=1, max_tokens=200)
    assert is_equal(await audited(thinking, record))
    record["choices"][0]["token_ids"][2] ^= 1
    assert not is_equal(await audited(thinking, record))


async def test_a_changed_token_is_found_at_every_place(client: httpx.AsyncClient) -> None:
    record = await recorded(client)
    ids = record["choices"][0]["token_ids"]
    for place, right in enumerate(ids):
        ids[place] = 33 + (right + 1) % 60
        (choice,) = await audited(client, record)
        first = choice["differences"][0]
        assert (first["position"], first["token_id"], first["target_token_id"]) == (place, ids[place], right)
        assert first["margin"] > 0
        ids[place] = right


CHANGES: list[dict[str, Any]] = [
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_k": 2},
    {"prompt": "abd"},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": {"50": 70}},
    {"max_tokens": 12},
    {"max_tokens": 30},
    {"structured_outputs": {"regex": "[a-z]{4,8}"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=json.dumps)
async def test_a_changed_request_is_found(client: httpx.AsyncClient, change: dict[str, Any]) -> None:
    record = await recorded(client)
    record["body"] |= change
    assert not is_equal(await audited(client, record))


@pytest.mark.parametrize("seeds", [{"seed": 8, "body": 8}, {"seed": 8, "body": None}], ids=json.dumps)
async def test_a_changed_seed_is_found(client: httpx.AsyncClient, seeds: dict[str, Any]) -> None:
    record = await recorded(client, n=2)
    record["seed"], record["body"]["seed"] = seeds["seed"], seeds["body"]
    assert not is_equal(await audited(client, record))


@pytest.mark.parametrize("at", [0, 11, -1])
async def test_a_dropped_token_is_found(client: httpx.AsyncClient, at: int) -> None:
    record = await recorded(client)
    record["choices"][0]["token_ids"].pop(at)
    assert not is_equal(await audited(client, record))


@pytest.mark.parametrize(
    ("field", "value"),
    [("finish_reason", "stop"), ("text", "another"), ("logprobs", [-0.5] * 24), ("logprobs", [-1.0])],
)
async def test_a_changed_fact_is_found(client: httpx.AsyncClient, field: str, value: Any) -> None:
    record = await recorded(client, logprobs=0)
    record["choices"][0][field] = value
    assert not is_equal(await audited(client, record))


async def test_a_text_without_ids_is_tokenized_with_its_end(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"stop": "K"}, {"logit_bias": {"256": 20.5}, "temperature": 0.8}):
        record = await recorded(client, **{"temperature": 0, "max_tokens": 300, **fields})
        assert (record["choices"][0]["finish_reason"] == "stop") == bool(fields)
        del record["choices"][0]["token_ids"]
        (choice,) = await audited(client, record)
        assert choice["is_tokenized"]
        assert is_equal([choice]), choice


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"verification": "rejection"}, "verification is rejection", "verification"),
    ({"seed": None, "body.seed": None}, "seed is missing", "seed"),
    ({"seed": 8}, "seed is 8, but 7 in the body", "seed"),
    ({"path": "/v1/embeddings"}, "path is '/v1/embeddings'", "path"),
    ({"version": 2}, "version is 2", "version"),
    ({"mood": "good"}, "mood is not a field", "mood"),
    ({"body.mood": "good"}, "body: mood is not a field", "body.mood"),
    ({"body.speculative": {"mood": 1}}, "body: speculative.mood is not a field", "body.speculative.mood"),
    ({"body.temperature": "hot"}, "body: temperature is 'hot'", "body.temperature"),
    ({"body.n": 2}, "choices has 1 texts, the request asks for 2", "choices"),
    ({"choices": [{"token_ids": []}]}, "choices.0 has neither token_ids nor text", "choices.0"),
    ({"choices": []}, "choices is []", "choices"),
    ({"choices": [{"token_ids": [4711]}]}, "choices.0.token_ids holds token id 4711", "choices.0.token_ids"),
]


@pytest.mark.parametrize(("change", "message", "param"), REFUSED, ids=[message for _, message, _ in REFUSED])
async def test_what_cannot_be_checked_is_refused_by_name(
    client: httpx.AsyncClient, change: dict[str, Any], message: str, param: str
) -> None:
    record = await recorded(client)
    for name, value in change.items():
        (record["body"] if name.startswith("body.") else record)[name.removeprefix("body.")] = value
    response = await client.post("/v1/audit", json=record)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["message"][: len(message)], error["param"]) == (message, param)


async def test_another_model_is_unknown_and_an_audit_ends_with_its_client(
    client: httpx.AsyncClient, routers: LocalRouters, rig: Rig
) -> None:
    record = await recorded(client)
    await audited(client, record)
    assert routers.num_closed == 2
    assert rig.engine.num_requests == 0
    record["body"]["model"] = "another"
    assert (await client.post("/v1/audit", json=record)).status_code == 404
