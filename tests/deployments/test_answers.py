"""The APIs say the same in their own forms: thoughts, text and calls, whole and in a stream, and errors of a stream."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from deployments.anthropic.messages_request import MessagesRequest
from deployments.openai.responses_request import ResponsesRequest
from engine.errors import TargetError
from tests.deployments.anthropic.clients import official
from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import says
from tests.deployments.templates import THINKING

USER: Any = [{"role": "user", "content": "hello"}]
CLOCK: Any = {"name": "clock", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "a } b"}}\n</tool_call>'
THOUGHTS = "<think>\nHm.\n</think>\n\n"
REASONS = {"completed": "stop", "end_turn": "stop", "tool_calls": "call", "tool_use": "call"}
REASONS |= {"incomplete": "length", "max_tokens": "length"}


class Answer(NamedTuple):
    """Kind and content of each part, why the answer ended, and the tokens of prompt and answer."""

    parts: list[tuple[str, Any]]
    reason: str
    usage: tuple[int, int]


def chat_parts(thoughts: str | None, text: str | None, calls: Sequence[str]) -> list[tuple[str, Any]]:
    texts = [("thinking", thoughts), ("text", text)]
    return [(kind, said) for kind, said in texts if said] + [("call", json.loads(call)) for call in calls]


async def by_chat(client: httpx.AsyncClient, options: Any, tools: Any) -> list[Answer]:
    create: Any = make_sdk(client).chat.completions.create
    options = {"messages": USER, "tools": [{"type": "function", "function": tool} for tool in tools], **options}
    whole = await create(**options)
    message = whole.choices[0].message.model_dump()
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    parts = chat_parts(message.get("reasoning_content"), message["content"], calls)
    options["stream_options"] = {"include_usage": True}
    *chunks, last = [chunk async for chunk in await create(**options, stream=True)]
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    thoughts, text = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    streamed: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
        streamed[call["index"]] = streamed.get(call["index"], "") + call["function"]["arguments"]
    return [
        Answer(said, REASONS.get(reason, reason), (usage.prompt_tokens, usage.completion_tokens))
        for said, reason, usage in (
            (parts, whole.choices[0].finish_reason, whole.usage),
            (chat_parts(thoughts, text, [*streamed.values()]), chunks[-1].choices[0].finish_reason, last.usage),
        )
    ]


async def by_responses(client: httpx.AsyncClient, options: Any, tools: Any) -> list[Answer]:
    options = {"input": USER, "tools": [{"type": "function", "strict": False, **tool} for tool in tools], **options}
    options["max_output_tokens"] = options.pop("max_tokens")
    responses: Any = make_sdk(client).responses
    whole = await responses.create(**options)
    events = [event async for event in await responses.create(**options, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items = events[-1].response.output
    assert len({item.id for item in items}) == len(items)
    for index, item in enumerate(items):
        its_own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (its_own[0].type, its_own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert {event.item_id for event in its_own if hasattr(event, "item_id")} == {item.id}
        deltas = "".join(event.delta for event in its_own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    kinds = {"message": "text", "function_call": "call", "reasoning": "thinking"}
    return [
        Answer(
            [
                (kinds[item.type], json.loads(item.arguments) if item.type == "function_call" else item.content[0].text)
                for item in answer.output
            ],
            "call" if "function_call" in {item.type for item in answer.output} else REASONS[answer.status],
            (answer.usage.input_tokens, answer.usage.output_tokens),
        )
        for answer in (whole, events[-1].response)
    ]


async def by_messages(client: httpx.AsyncClient, options: Any, tools: Any) -> list[Answer]:
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
    options = {"messages": USER, "tools": tools, **options}
    messages: Any = official(client).messages
    whole = await messages.create(**options)
    async with messages.stream(**options) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    for kind in ("content_block_start", "content_block_stop"):
        assert [event.index for event in events if event.type == kind] == list(range(len(final.content)))
    kinds = {"thinking": "thinking", "text": "text", "input": "call"}
    return [
        Answer(
            [(kinds[name], getattr(block, name)) for block in answer.content for name in kinds if hasattr(block, name)],
            REASONS[answer.stop_reason],
            (answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0), answer.usage.output_tokens),
        )
        for answer in (whole, final)
    ]


APIS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_every_api_says_what_a_chat_completion_says(client: httpx.AsyncClient, temperature: float) -> None:
    options = {"model": "tiny", "max_tokens": 16, "extra_body": {"temperature": temperature, "seed": 7}}
    answers = [answer for ask in APIS.values() for answer in await ask(client, options, [])]
    assert [kind for kind, _ in answers[0].parts] == ["text"]
    assert (answers[0].reason, answers[0].usage[1]) == ("length", 16)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Well, <tool", ["text"]),
        (f"Well.\n{CALL}\n{CALL.replace('a }', 'c }')}", ["text", "call", "call"]),
        (f"{CALL} So.", ["call", "text"]),
        (f"{THOUGHTS}Well.\n{CALL}", ["thinking", "text", "call"]),
    ],
)
async def test_thoughts_text_and_calls_are_parts_in_their_order(
    api: str, text: str, kinds: list[str], routers: LocalRouters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat completion has fields instead: thoughts, text, calls."""
    for cls in (ResponsesRequest, MessagesRequest):
        says(monkeypatch, cls, text)
    options: Any = {"model": "tiny", "max_tokens": 300, "extra_body": {"seed": 7}}
    if api == "chat":
        options["extra_body"]["structured_outputs"] = {"choice": [text]}
        kinds = sorted(kinds, key=["thinking", "text", "call"].index)
    async with client_of(THINKING, routers, tmp_path) as client:
        whole, streamed = await APIS[api](client, options, [CLOCK])
    assert whole == streamed
    assert [kind for kind, _ in whole.parts] == kinds
    contents = [content for kind, content in whole.parts if kind != "text"]
    assert contents == [
        *["Hm."] * kinds.count("thinking"),
        *[{"zone": "a } b"}, {"zone": "c } b"}][: kinds.count("call")],
    ]
    assert whole.reason == ("call" if "call" in kinds else "stop")


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("chat/completions", {"messages": USER}, {"error"}),
        ("responses", {"input": "x"}, {"type", "sequence_number", "message", "param", "code"}),
        ("messages", {"messages": USER, "max_tokens": 8}, {"type", "error", "request_id"}),
    ],
)
async def test_an_error_after_the_first_byte_is_an_event_of_the_api(
    client: httpx.AsyncClient, routers: LocalRouters, path: str, fields: Any, names: set[str]
) -> None:
    routers.error = TargetError("the target is gone")
    response = await client.post(f"/v1/{path}", json={**fields, "stream": True})
    *_, last = (event for event in response.text.split("\n\n") if "data: {" in event)
    assert ("event: error" in last) == (path != "chat/completions")
    error = json.loads(last.partition("data: ")[2].partition("\n")[0])
    assert error.keys() == names
    error = error.get("error", error)
    assert (error["message"], error["type"]) == (
        "the target is gone",
        {"chat/completions": "server_error", "responses": "error"}.get(path, "overloaded_error"),
    )
