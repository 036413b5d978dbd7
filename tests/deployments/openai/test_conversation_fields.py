"""Messages, and how a conversation becomes a prompt, through the official client."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.conftest import client_of, make_sdk
from tests.deployments.fakes import LocalRouters

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
    async with client_of(TEMPLATE, routers, tmp_path) as client:
        yield client


SWITCHED = "{{ messages[0].content }}{% if thinking is not defined %}{% set thinking = 1 %}{% endif %}{{ thinking }}"


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        (SWITCHED, "none", "hiFalse"),
        (SWITCHED, "low", "hiTrue"),
        ("a {{ messages[0].content }}", "none", "a hi"),
        ("a thinking {{ messages[0].content }}", "none", None),
    ],
)
async def test_an_effort_sets_a_switch_or_is_refused(
    routers: LocalRouters, tmp_path: Path, template: str, effort: str, expected: str | None
) -> None:
    async with client_of(template, routers, tmp_path) as http:
        if expected is not None:
            assert await prompt(http, routers, reasoning_effort=effort) == expected
            return
        for path, fields, name in (
            ("chat/completions", {"messages": USER, "reasoning_effort": effort}, "reasoning_effort"),
            ("responses", {"input": "hi", "reasoning": {"effort": effort}}, "reasoning.effort"),
        ):
            error = (await http.post(f"/v1/{path}", json=fields)).json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(
                f"{name} is {effort!r}, but the chat template reads none of enable_thinking"
            )
        fields = {"messages": USER, "max_tokens": 1, "output_config": {"effort": effort}}
        assert (await http.post("/v1/messages", json=fields)).status_code == 200  # Claude Code sends it to any model


async def prompt(http: httpx.AsyncClient, routers: LocalRouters, messages: Any = USER, **fields: Any) -> str:
    """The prompt of a chat completion, which must also be what /tokenize says."""
    sdk = make_sdk(http)
    await sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=fields)
    (ids,) = routers.last.prompts
    tokens = (await http.post("/tokenize", json={"messages": messages, **fields})).json()["tokens"]
    assert tokens == ids
    return (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BEGUN),
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
