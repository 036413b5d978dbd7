"""/v1/responses through the official client: the text of a chat completion, in the newer shape."""

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from engine.errors import TargetError
from tests.deployments.fakes import LocalRouters

OPTIONS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}


async def chat_text(sdk: openai.AsyncOpenAI, messages: Any) -> str:
    chat = await sdk.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    return chat.choices[0].message.content or ""


async def test_a_response_says_what_a_chat_completion_says(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(input="hello", **OPTIONS)
    assert response.output_text == await chat_text(sdk, [{"role": "user", "content": "hello"}])
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert (response.object, response.max_output_tokens, response.temperature) == ("response", 8, 0)
    assert response.id.startswith("resp_")


async def test_instructions_and_earlier_answers_are_part_of_the_conversation(sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.responses.create(input="a", instructions="be brief", metadata={"key": "value"}, **OPTIONS)
    assert first.metadata == {"key": "value"}
    assert first.instructions == "be brief"
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    again: Any = {"role": "user", "content": "b"}
    # What the client got goes back as it came.
    history: Any = [user, *(item.model_dump() for item in first.output), again]
    second = await sdk.responses.create(input=history, instructions="be brief", **OPTIONS)
    expected = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "b"},
    ]
    assert second.output_text == await chat_text(sdk, expected)


async def test_a_stream_has_openais_events_in_order(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.responses.create(input="hello", **OPTIONS)
    events = [event async for event in await sdk.responses.create(input="hello", stream=True, **OPTIONS)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type.removeprefix("response.") for event in events]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


async def test_the_clients_own_accumulation_agrees(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(input="hello", **OPTIONS) as stream:
        async for _ in stream:
            pass
    whole = await sdk.responses.create(input="hello", **OPTIONS)
    assert whole.output_text


async def test_a_schema_is_followed(sdk: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 1}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = await sdk.responses.create(model="tiny", input="x", text=form, temperature=0, max_output_tokens=200)
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), schema)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
        ({"input": "x" * 2000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["everything"]}, "include.0"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"model": "other"}, "model"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "mouse"}}}}, "text.format.schema"),
    ],
)
async def test_a_bad_request_is_refused_by_the_name_it_has_here(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    response = await client.post("/v1/responses", json={"input": "x", **fields})
    assert response.status_code == (404 if param == "model" else 400), response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param
    assert "messages" not in error["message"]
    assert "response_format" not in error["message"]


async def test_an_error_in_a_stream_is_an_event(sdk: openai.AsyncOpenAI, routers: LocalRouters) -> None:
    routers.error = TargetError("the target is gone")
    events = [event async for event in await sdk.responses.create(input="hello", stream=True, **OPTIONS)]
    assert events[-1].type == "error"


async def test_an_error_event_has_openais_fields(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    routers.error = TargetError("the target is gone")
    response = await client.post("/v1/responses", json={"input": "x", "stream": True})
    name, data = response.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert set(event) == {"type", "sequence_number", "message", "param", "code"}
