"""/v1/chat/completions through HTTP: a conversation and its answer."""

import re

import httpx

from deployments.openai.chat import ChatCompletionRequest, ChatWriter
from deployments.openai.message_parts import CallStart
from deployments.openai.writer import Reply
from deployments.prompts.message_forms import form_of
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import GREEDY, events
from tests.deployments.templates import HERMES, tokenizer_of


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
    assert routers.last.params.max_tokens == 512 - len(routers.last.prompts[0])


async def test_token_ids_come_when_asked_and_those_of_the_prompt_once(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = await events(client, "/v1/chat/completions", messages=messages, return_token_ids=True)
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert sum(len(chunk["choices"][0].get("token_ids") or []) for chunk in chunks) == 8
    for chunk in await events(client, "/v1/chat/completions", messages=messages, return_token_ids=False):
        assert "token_ids" not in chunk["choices"][0]


def test_a_call_has_an_id_of_its_own_that_depends_on_the_answer_alone() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools})
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = []
    for reply_id, num_texts in (("a", 1), ("a", 2), ("b", 1)):
        writer = ChatWriter(Reply(reply_id, "tiny", "", [[1]], None, 4), request, form_of(tokenizer_of(HERMES)))
        texts = [call + call] if num_texts == 1 else [call, f"{call} "]
        pieces = [piece for text in texts for piece in writer.read(writer.choices[0], text, is_last=text is texts[-1])]
        ids.append([piece.id for piece in pieces if isinstance(piece, CallStart)])
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4
    assert all(re.fullmatch("[a-z0-9]{9}", call_id) for call_id in ids[0])  # Mistral's templates refuse all others
