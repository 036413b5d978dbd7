"""A stream can be continued after each of its events, and its text is then the whole stream's."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.ingress.event_ids import HEADER, MAX_CHOICES, read_id
from engine.errors import RequestError
from tests.deployments.conftest import client_of, make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import GREEDY
from tests.deployments.templates import THINKING

SHOWN = [
    "text",
    "content",
    "reasoning_content",
    "arguments",
    "partial_json",
    "delta",
    "texts",
    "name",
    "token_ids",
    "token",
]
KEPT = ["id", "created", "finish_reason", "call_id", "item_id"]
NOTHING, ANY = {"type": "object", "properties": {}}, {"type": "any"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": NOTHING}}]
MESSAGES = [{"role": "user", "content": "abc"}]
SAMPLED: dict[str, Any] = {"max_tokens": 7, "temperature": 3.0, "ignore_eos": True}
THOUGHTS = '<think>\nHm.\n</think>\n\nSo <b>.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "two choices": ("completions", {"prompt": ["ab", "c"], "n": 2, **SAMPLED, "logprobs": 1}),
    "stop string": ("completions", {"prompt": "abc", "echo": True, **GREEDY, "max_tokens": 20, "stop": ["U"]}),
    "usage and ids": (
        "completions",
        {"prompt": "abc", **SAMPLED, "return_token_ids": True, "stream_options": {"include_usage": True}},
    ),
    "trace": ("chat/completions", {"messages": MESSAGES, **SAMPLED, "speculative": {"trace": True}}),
    "a call": ("chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 1}),
    "thoughts and a call": (
        "chat/completions",
        {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 99, "structured_outputs": {"choice": [THOUGHTS]}},
    ),
    "responses": ("responses", {"input": "abc", "max_output_tokens": 16, "temperature": 3.0, "ignore_eos": True}),
    "messages": ("messages", {"messages": MESSAGES, "max_tokens": 16, "temperature": 3.0}),
    "a tool use": (
        "messages",
        {"messages": MESSAGES, "max_tokens": 64, "tools": [{"name": "f", "input_schema": NOTHING}], "tool_choice": ANY},
    ),
}


async def stream(client: httpx.AsyncClient, name: str, last_event_id: str | None = None) -> list[tuple[str, str]]:
    """The data and the id of each event."""
    path, body = STREAMS[name]
    headers = {} if last_event_id is None else {HEADER: last_event_id}
    response = await client.post(f"/v1/{path}", json={"stream": True, **body}, headers=headers)
    assert response.status_code == 200, response.text
    events = []
    for event in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines() if not line.startswith(":"))
        if fields and fields["data"] != "[DONE]":
            events.append((fields["data"], fields["id"]))
    return events


def texts(events: list[tuple[str, str]]) -> dict[str, str]:
    """All text of a stream, by where it stands."""
    found: dict[str, str] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}.{node.get('index', '')}.{key}")
        elif isinstance(node, list):
            for entry in node:
                walk(entry, path)
        elif (name := path.rpartition(".")[2]) in SHOWN:
            found[path] = found.get(path, "") + str(node)
        elif node is not None and name in KEPT:
            found[path] = str(node)

    for data, _ in events:
        body = json.loads(data)
        if not body.get("type", "").endswith((".done", ".completed", ".incomplete")):
            walk(body, "")
    return found


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_continues_after_each_of_its_events(name: str, routers: LocalRouters, tmp_path: Path) -> None:
    async with client_of(THINKING, routers, tmp_path) as client:
        await check_all_events(client, name)


async def check_all_events(client: httpx.AsyncClient, name: str) -> None:
    whole = await stream(client, name)
    assert len(whole) > 3
    assert len({event_id for _, event_id in whole}) == len(whole)
    for count, (_, event_id) in enumerate(whole, 1):
        if count % (1 + len(whole) // 16) and count < len(whole) - 4:
            continue
        rest = await stream(client, name, event_id)
        assert texts(whole[:count] + rest) == texts(whole), event_id
        if name == "responses":
            numbers = [json.loads(data)["sequence_number"] for data, _ in whole[:count] + rest]
            assert numbers == list(range(len(numbers)))


async def test_a_text_that_differs_is_an_error_and_not_a_splice(client: httpx.AsyncClient) -> None:
    whole = await stream(client, "trace")
    event_id = whole[len(whole) // 2][1]
    wrong = re.sub(r"\.(\d+)(?=/|$|\+)", lambda match: f".{int(match[1]) ^ 1}", event_id)
    assert wrong != event_id
    path, body = STREAMS["trace"]
    response = await client.post(f"/v1/{path}", json={"stream": True, **body}, headers={HEADER: wrong})
    assert "differs from the one sent before" in response.text
    too_far = re.sub(r":(\d+)\.(\d+)\.(\d+)$", ":400.2.3", event_id)
    assert too_far != event_id
    response = await client.post(f"/v1/{path}", json={"stream": True, **body}, headers={HEADER: too_far})
    assert "differs from the one sent before" in response.text


async def test_many_choices_have_no_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a"] * (MAX_CHOICES + 1), "max_tokens": 1, "stream": True}
    assert "id: " not in (await client.post("/v1/completions", json=body)).text


async def test_another_ingress_continues_a_stream_whose_rounds_were_others(
    config: AppConfig, routers: LocalRouters, client: httpx.AsyncClient
) -> None:
    """The second gathers all tokens in one output, so the last event lies inside it."""
    whole = await stream(client, "two choices")
    async with make_client(await make_app(config.model_copy(update={"stream_interval_s": 30}), routers)) as other:
        for count in (2, 5, 7):
            rest = await stream(other, "two choices", whole[count - 1][1])
            assert len(rest) < len(whole) - count
            assert texts(whole[:count] + rest) == texts(whole)


@pytest.mark.parametrize(
    ("prompt", "changed", "message"),
    [
        ("abc", {"prompt": "abd"}, "another request"),
        (["ab", "c"], {"prompt": ["a", "bc"]}, "another request"),
        ("abc", {"max_tokens": 8}, "another request"),
        ("abc", {"n": 2}, "no id of an event of such a stream"),
        ("abc", {"stream": False}, "only allowed with stream"),
    ],
)
async def test_only_the_same_request_continues_a_stream(
    prompt: str | list[str], changed: dict[str, Any], message: str, client: httpx.AsyncClient
) -> None:
    body = {"prompt": prompt, "stream": True, **SAMPLED}
    response = await client.post("/v1/completions", json=body)
    (event_id,) = [line[4:] for line in response.text.split("\n") if line.startswith("id: ")][:1]
    refused = await client.post("/v1/completions", json={**body, **changed}, headers={HEADER: event_id})
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == HEADER


async def test_other_rules_give_events_no_ids(config: AppConfig, routers: LocalRouters) -> None:
    rejection = AppConfig(target_model=config.pair.target.path, verification="rejection", served_model_name="tiny")
    async with make_client(await make_app(rejection, routers)) as client:
        body = {"prompt": "abc", "stream": True, **SAMPLED}
        assert "id: " not in (await client.post("/v1/completions", json=body)).text
        response = await client.post("/v1/responses", json={"stream": True, **STREAMS["responses"][1]})
        numbers = [json.loads(line[6:])["sequence_number"] for line in response.text.split("\n") if line[:5] == "data:"]
        assert numbers == list(range(len(numbers)))
        refused = await client.post("/v1/completions", json=body, headers={HEADER: "a"})
        assert "needs the coupled rule" in refused.json()["error"]["message"]


@pytest.mark.parametrize("text", ["", "a", "cmpl-" + "0" * 32 + ":1:2:" + "0" * 12 + ":1:s0:1.2,", "\u00e9" * 9])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no id of an event"):
        read_id(text, 1)
