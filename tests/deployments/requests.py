"""Requests to an application in this process."""

from typing import Any

import httpx
import pytest

from deployments.openai.structured_output import StructuredOutputs
from deployments.openai.tools import MessageForm
from tests.fakes.streams import events_of

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events; it must end in [DONE]."""
    response = await client.post(path, json={"stream": True, **GREEDY, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return events_of(response.text)


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "abc", **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def text_of(client: httpx.AsyncClient, **body: Any) -> str:
    """The text of a greedy completion, which must end by itself."""
    sent = {"prompt": "abc", "temperature": 0, "max_tokens": 300, **body}
    response = await client.post("/v1/completions", json=sent)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"]


async def error_of(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The error that refuses a completion, or a chat if there are messages."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await client.post(path, json=body if "messages" in body else {"prompt": "abc", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def http_scope(path: str) -> dict[str, Any]:
    """The ASGI scope of a JSON request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("paceline", 80),
    }


def says(monkeypatch: pytest.MonkeyPatch, cls: Any, text: str) -> None:
    """Make the model answer requests of a class with this text alone, thoughts included."""
    monkeypatch.setattr(MessageForm, "thoughts_after", lambda form, prompt: None)
    to_chat, only = cls.to_chat, {"structured_outputs": StructuredOutputs(choice=[text])}
    monkeypatch.setattr(cls, "to_chat", lambda request: to_chat(request).model_copy(update=only))
