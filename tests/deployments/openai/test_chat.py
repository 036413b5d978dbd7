"""/v1/chat/completions through HTTP: a conversation and its answer."""

from typing import Any

import httpx
import pytest

from deployments.openai.chat import ChatCompletionRequest, ChatWriter
from deployments.openai.tool_calls import CallStart
from deployments.openai.tools import HERMES
from deployments.openai.writer import Reply
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import GREEDY, events


async def test_a_conversation_is_answered(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    response = await client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, "logprobs": True})
    body = response.json()
    choice = body["choices"][0]
    assert (body["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert len(choice["logprobs"]["content"]) == 8
    first, *chunks = await events(client, "/v1/chat/completions", messages=messages)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 7 + ["length"]


async def test_a_conversation_takes_all_the_room_unless_told(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    response = await client.post("/v1/chat/completions", json={**body, "stop": "a"})
    assert response.status_code == 200
    assert routers.last is not None
    assert routers.last.params.max_tokens == 512 - len(routers.last.prompts[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
async def test_a_bad_conversation_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = await client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param or (param is None and error["param"].startswith("messages.0.content.0")), error


def test_a_call_has_an_id_of_its_own_that_depends_on_the_answer_alone() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools})
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = []
    for reply_id, num_texts in (("a", 1), ("a", 2), ("b", 1)):
        writer = ChatWriter(Reply(reply_id, "tiny", "", [[1]], None, 4), request, HERMES)
        texts = [call + call] if num_texts == 1 else [call, call]
        pieces = [piece for text in texts for piece in writer.read(writer.choices[0], text, is_last=text is texts[-1])]
        ids.append([piece.id for piece in pieces if isinstance(piece, CallStart)])
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4
