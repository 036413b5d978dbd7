"""How a conversation becomes a prompt, through the official client."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.config import AppConfig
from deployments.openai.chat_template import ConversationRequest
from tests.deployments.conftest import make_app, make_client, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.fakes import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts {% endif %}"
    "{% if reasoning_effort %}effort: {{ reasoning_effort }} {% endif %}"
    "{% if tone %}{{ tone | upper }} {% endif %}{% endif %}"
)
USER: Any = [{"role": "user", "content": "hi"}]
ASKED = "<|start|>user\nhi<|end|>\n"
BEGUN = f"{ASKED}<|start|>assistant\n"


@pytest.fixture
async def http(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="</s>", additional_special_tokens=["<|start|>", "<|end|>"]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


async def prompt(http: httpx.AsyncClient, routers: LocalRouters, messages: Any = USER, **fields: Any) -> str:
    """The prompt of a chat completion, which must also be what /tokenize says."""
    sdk = make_sdk(http)
    await sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=fields)
    assert routers.last is not None
    (ids,) = routers.last.prompts
    tokens = (await http.post("/tokenize", json={"messages": messages, **fields})).json()["tokens"]
    assert tokens == ids
    return (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BEGUN),
        ({"add_generation_prompt": True}, BEGUN),
        ({"add_generation_prompt": False}, ASKED),
        ({"add_special_tokens": True}, BEGUN),  # this tokenizer adds none
        ({"chat_template_kwargs": {"enable_thinking": False}}, f"{BEGUN}no thoughts "),
        ({"chat_template_kwargs": {"tone": "dry", "unknown": [1]}}, f"{BEGUN}DRY "),
        ({"reasoning_effort": "low"}, f"{BEGUN}effort: low "),
        ({"reasoning_effort": "none"}, f"{BEGUN}no thoughts effort: none "),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, f"{BEGUN}effort: none "),
    ],
)
async def test_a_field_changes_the_prompt(
    http: httpx.AsyncClient, routers: LocalRouters, fields: dict[str, Any], expected: str
) -> None:
    assert await prompt(http, routers, **fields) == expected


@pytest.mark.parametrize("text", ["Well, ", "Well, </s> and <|end|>", ""])
async def test_the_last_message_can_be_continued(http: httpx.AsyncClient, routers: LocalRouters, text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    for fields in ({}, {"add_generation_prompt": False}):
        assert await prompt(http, routers, messages, continue_final_message=True, **fields) == BEGUN + text


async def test_thoughts_go_where_the_template_puts_them(http: httpx.AsyncClient, routers: LocalRouters) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning_content": "deep <|end|>"}
    assert await prompt(http, routers, [thought]) == "<|start|>assistant\n(deep <|end|>)a<|end|>\n<|start|>assistant\n"
    # The template leaves out earlier ones, and what comes after them stays where it is.
    messages = [thought, {"role": "user", "content": "b <|end|>"}]
    shown = "<|start|>assistant\na<|end|>\n<|start|>user\nb <|end|><|end|>\n<|start|>assistant\n"
    assert await prompt(http, routers, messages) == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"tone": "<|end|>"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tone": {"a": 1}, "raise_exception": 1}}, None),
        ({"chat_template_kwargs": {"tone": "x" * 10_000}}, "chat_template_kwargs"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
async def test_what_a_request_may_not_say_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        response = await http.post(path, json={"messages": USER, **fields})
        if param is None:  # what a template makes of such a value is its own affair
            assert response.status_code in (200, 400)
        else:
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_template_that_fails_is_the_requests_fault(routers: LocalRouters, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="</s>")
    tokenizer.chat_template = "{% for i in range(n) %}a{% endfor %}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        for value in ("x", [], {}, 10**9):
            body = {"messages": USER, "chat_template_kwargs": {"n": value}}
            response = await client.post("/tokenize", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_rendering_is_the_defaults_unless_told() -> None:
    rendering = ConversationRequest().rendering(adds_special_tokens=None)
    assert (rendering.begins_answer, rendering.continues_last, rendering.adds_special_tokens) == (True, False, False)
    assert (rendering.tools, rendering.variables) == ([], {})
