"""What chat templates read: features of real templates, each rebuilt, and the prompts that they write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deployments.openai.chat import ChatCompletionRequest
from deployments.prompts.conversation import ChatTemplate
from engine.errors import RequestError
from tests.chat_templates import QUESTIONS, Asked, report
from tests.deployments.templates import tokenizer_of
from tests.families import PAGE

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (  # SmolVLM, Idefics 3
    "{% for m in messages %}{{ m.role | title }}{{ ':' if m.content[0]['type'] == 'image' else ': ' }}"
    "{% for line in m.content %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
PARTS_OF_USERS = (  # LLaVA-NeXT the other way round
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content[0]['text'] }}{% else %}"
    "{{ '' + m.content }}{% endif %}{% endfor %}"
)
CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}[%s]{% endfor %}"


def with_call(call: str, result: str = "") -> str:
    shown = CHAT.replace("{{ m.content }}", "{{ m.content }}" + CALL.replace("%s", call) + "%s")
    return shown.replace("%s", "{% if m.role == 'tool' %}" + result + "{% endif %}")


OBJECT = with_call("{{ f.name }} {{ f.arguments | tojson }}")
ITEMS = with_call("{{ f.name }}{% for k, v in f.arguments | items %} {{ k }}={{ v }}{% endfor %}")
CONCATENATED = with_call("{{ f.name + ' ' + f.arguments }}")  # DeepSeek V3
PRINTED = with_call("{{ f.name }} {{ f.arguments }}")  # would print an object as Python does
KIMI = with_call("{{ c.id }} {{ f.arguments | tojson }}", " of {{ m.tool_call_id }}")
KIMI_OWN = with_call("functions.{{ f.name }}:{{ loop.index0 }} {{ f.arguments }}", " of {{ m.tool_call_id }}")
MISTRAL = with_call(
    "{{ raise_exception('nine!') if c.id | length != 9 }}{{ f | tojson }} {{ c.id }}", " of {{ m.tool_call_id }}"
)
ONE_CALL = (  # Llama 3.1
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{{ raise_exception('single tool-calls only') if m.tool_calls | length != 1 }}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GPT_OSS = (  # the first of several calls; thoughts or a text beside it
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{{ raise_exception('both') if m.content and m.thinking }}{{ m.thinking or m.content }}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_ONLY = (  # Qwen3.5
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
_ALTERNATE = "{{ raise_exception('roles must alternate') if (m.role == 'user') != (loop.index0 % 2 == 0) }}"
ALTERNATING = (  # Gemma 3, Mistral
    "{% set system = messages[0].content + '|' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}" + _ALTERNATE + "<{{ m.role }}>"
    "{{ system if loop.first }}{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (  # Gemma 1 and 2
    "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    "{% for m in messages %}" + _ALTERNATE + "<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
AT_LAST_USER = (  # Mistral Nemo: no system message where a result comes last
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>"
    "{{ system ~ '|' if system and loop.last and m.role == 'user' }}{{ m.content }}"
    + CALL.replace("%s", "{{ f | tojson }}")
    + "{% endif %}{% endfor %}"
)
LAST_SYSTEM = (  # DeepSeek R1 Distill
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}{{ ns.system }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(*ids: str, content: str = "", **fields: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": '{"a":  1}'}
    return (
        said("assistant", content, tool_calls=[{"id": i, "type": "function", "function": function} for i in ids])
        | fields
    )


def result(content: str, call_id: str = "call_1") -> dict[str, Any]:
    return said("tool", content, tool_call_id=call_id)


def prompt_of(template: Any, *messages: dict[str, Any], **fields: Any) -> str:
    tokenizer = tokenizer_of(None)
    tokenizer.chat_template = template
    request = ChatCompletionRequest.model_validate({"messages": list(messages), **fields})
    return "".join(text for text, _ in ChatTemplate(tokenizer).render(tokenizer, request, request.messages))


S, U, A, T = said("system", "Be brief."), said("user", "Hi"), said("assistant", "Yes?"), said("system", "Be kind.")
JSON = '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (PARTS, [said("user", "What is 2+2?")], "User: What is 2+2?\n"),
        (PARTS, [S, U, A, U], "System: Be brief.\nUser: Hi\nAssistant: Yes?\nUser: Hi\n"),
        (PARTS_OF_USERS, [S, U, A, U], "<system>Be brief.<user>Hi<assistant>Yes?<user>Hi"),
        (PARTS_OF_USERS, [said("user", [{"type": "text", "text": text} for text in ("a", " b")])], "<user>a b"),
        (CHAT, [said("user", [{"type": "text", "text": text} for text in ("a", " b")])], "<user>a b"),
        # Arguments
        (OBJECT, [U, call("call_1"), result("3")], f"<user>Hi<assistant>[f {JSON}]<tool>3"),
        (ITEMS, [U, call("call_1"), result("3")], "<user>Hi<assistant>[f a=1]<tool>3"),
        (CONCATENATED, [U, call("call_1"), result("3")], '<user>Hi<assistant>[f {"a":  1}]<tool>3'),
        (PRINTED, [U, call("call_1"), result("3")], '<user>Hi<assistant>[f {"a":  1}]<tool>3'),
        # Ids
        (
            KIMI,
            [U, call("x", "y"), result("3", "x"), result("4", "y"), call("x"), result("5", "x")],
            f"<user>Hi<assistant>[functions.f:0 {JSON}][functions.f:1 {JSON}]<tool>3 of functions.f:0"
            f"<tool>4 of functions.f:1<assistant>[functions.f:2 {JSON}]<tool>5 of functions.f:2",
        ),
        (KIMI_OWN, [call("x"), result("3", "x")], '<assistant>[functions.f:0 {"a":  1}]<tool>3 of functions.f:0'),
        (
            MISTRAL,
            [call("c123456x9"), result("3", "c123456x9")],
            f'<assistant>[{{"name": "f", "arguments": {JSON}}} c123456x9]<tool>3 of c123456x9',
        ),
        (
            MISTRAL,
            [call("call_1"), result("3"), result("4", "toolu_unknown")],
            f'<assistant>[{{"name": "f", "arguments": {JSON}}} ef35225de]<tool>3 of ef35225de<tool>4 of 3efad993f',
        ),
        # System messages
        (CHAT, [S, U, T, A, U], "<system>Be brief.<user>Hi<system>Be kind.<assistant>Yes?<user>Hi"),
        (FIRST_ONLY, [S, T, U, T, A, U], "<system>Be brief.\n\nBe kind.<user>Hi<user>Be kind.<assistant>Yes?<user>Hi"),
        (FIRST_ONLY, [U, S], "<user>Hi<user>Be brief."),
        (ALTERNATING, [S, U, T, A, U], "<user>Be brief.\n\nBe kind.|Hi<assistant>Yes?<user>Hi"),
        (NO_SYSTEM, [S, U, A, U, T], "<user>Be brief.\n\nBe kind.\n\nHi<assistant>Yes?<user>Hi"),
        (NO_SYSTEM, [S], "<user>Be brief."),
        (LAST_SYSTEM, [S, U, T], "Be brief.<user>Hi<user>Be kind."),
        (AT_LAST_USER, [S, U], "<user>Be brief.|Hi"),
        (
            AT_LAST_USER,
            [S, U, call("call_1"), result("3")],
            f'<user>Be brief.\n\nHi<assistant>[{{"name": "f", "arguments": {JSON}}}]<tool>3',
        ),
        # One call in a message
        (
            ONE_CALL,
            [S, U, call("x", "y", content="Look."), result("4", "y"), result("3", "x"), result("5", "z"), A],
            f'<system>Be brief.<user>Hi<assistant>Look.<assistant>{{"name": "f", "arguments": {JSON}}}<tool>3'
            f'<assistant>{{"name": "f", "arguments": {JSON}}}<tool>4<tool>5<assistant>Yes?',
        ),
        (
            GPT_OSS,
            [call("x", "y", reasoning_content="Hm.")],
            f'<assistant>Hm.{{"name": "f", "arguments": {JSON}}}<assistant>{{"name": "f", "arguments": {JSON}}}',
        ),
        (GPT_OSS, [call("x", reasoning_content="Hm.")], f'<assistant>Hm.{{"name": "f", "arguments": {JSON}}}'),
        (
            GPT_OSS,
            [call("x", content="a", reasoning_content="Hm.")],
            f'<assistant>a{{"name": "f", "arguments": {JSON}}}',
        ),
        # What templates change is not left out.
        (FIRST_ONLY, [said("user", " a\n"), said("assistant", " ")], "<user>a<assistant>"),
        (
            CHAT.replace("m.content", "m.content.split('</think>')[-1]"),
            [U, said("assistant", "<think>Hm.</think>a")],
            "<user>Hi<assistant>a",
        ),
        (
            CHAT.replace("m.content", "m.content.split('<think>')[0]"),
            [U, said("assistant", "a<think>Hm.")],
            "<user>Hi<assistant>a",
        ),
        (CHAT.replace("m.content", "m.content | tojson"), [said("user", 'é "x"\n')], '<user>"é \\"x\\"\\n"'),
    ],
)
def test_every_text_is_in_the_prompt(template: str, messages: list[dict[str, Any]], prompt: str) -> None:
    assert prompt_of(template, *messages) == prompt


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (
            CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            [U, A, result("3")],
            "the chat template leaves out the text of messages[2] (role tool)",
        ),
        (CHAT, [U, call("x")], "the chat template leaves out the arguments of messages[1].tool_calls[0]"),
        (
            with_call("{{ f.arguments | tojson }}"),
            [U, call("x")],
            "the chat template leaves out the name of messages[1].tool_calls[0]",
        ),
        (
            with_call("{{ f.name }}"),
            [U, call("x")],
            "the chat template leaves out the arguments of messages[1].tool_calls[0]",
        ),
        ("{{ messages[-1].content }}", [U, A], "the chat template leaves out the text of messages[0] (role user)"),
        (
            CHAT.replace("m.content", "m.content[:60]"),
            [U, said("user", "long " * 9)],
            "the chat template leaves out the text of messages[1] (role user)",
        ),
        (ALTERNATING, [U, U], "the chat template refuses the messages: roles must alternate"),
        (
            FIRST_ONLY + "{{ raise_exception('to ' + messages[0].content) }}",
            [U],
            "the chat template refuses the messages: to Hi",
        ),
        (NO_SYSTEM, [S, U, U], "the chat template refuses the messages: System role not supported"),
    ],
)
def test_a_prompt_without_a_text_is_refused_by_its_name(
    template: str, messages: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prompt_of(template, *messages)
    assert (str(caught.value), caught.value.param) == (sentence, "messages")


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match=r"leaves out the name of tools\[0\]") as caught:
        prompt_of(CHAT, U, tools=tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ("{{ '// ' + tool.function.description + ' ' + tool.function.name }}", "//  f"),  # gpt-oss
        ("{{ tool.function | tojson }}", '{"name": "f"}'),
    ],
)
def test_a_tool_has_the_fields_that_its_template_needs(tool: str, shown: str) -> None:
    template = "{% for tool in tools or [] %}" + tool + "{% endfor %}" + CHAT
    assert prompt_of(template, U, tools=[{"type": "function", "function": {"name": "f"}}]) == f"{shown}<user>Hi"


def test_named_templates_are_chosen_as_transformers_does() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tool_use = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHAT
    named = {"default": "D" + CHAT, "rag": "R" + CHAT, "tool_use": tool_use}
    assert prompt_of(named, U) == "D<user>Hi"
    assert prompt_of(named, U, tools=tools) == "f<user>Hi"
    assert prompt_of(named, U, tools=tools, tool_choice="none") == "D<user>Hi"
    assert prompt_of({"tool_use": tool_use}, U) == "<user>Hi"  # no tools are an empty list there
    assert prompt_of({"default": "D" + tool_use}, U, tools=tools) == "Df<user>Hi"


@pytest.mark.parametrize("template", [CHAT, PARTS, FIRST_ONLY, ALTERNATING])
def test_the_last_message_is_continued(template: str) -> None:
    begun = said("assistant", "It is")
    assert prompt_of(template, S, U, begun, continue_final_message=True).endswith("It is")
    with pytest.raises(RequestError, match="leaves out the arguments"):
        prompt_of(OBJECT, U, call("x", content="It is"), continue_final_message=True)


ROWS = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", PAGE.read_text().partition("# Chat templates")[2], re.MULTILINE))
FEATURES = {
    "content is a list of parts": PARTS,
    "one system message": FIRST_ONLY,
    "one system message, and users and answers in turn": ALTERNATING,
    "no system message": NO_SYSTEM,
    "no system message after a result": AT_LAST_USER,
    "one call in an answer, without a text": ONE_CALL,
    "the arguments of calls are text": CONCATENATED,
    "the id of a call has nine letters": MISTRAL,
    "the id of a call has its name": KIMI,
    "the answer of a tool is left out": CHAT.replace("messages %}", "messages if m.role != 'tool' %}"),
}


@pytest.mark.parametrize(("feature", "template"), FEATURES.items())
def test_the_table_says_how_a_feature_is_served(feature: str, template: str) -> None:
    assert ROWS.keys() - {"feature", "---"} == FEATURES.keys() | {"none of these"}
    tokenizer = tokenizer_of(template.replace("messages %}", "messages %}{# tools #}", 1))
    answers = {question: Asked(tokenizer).answer(question) for question in QUESTIONS}
    assert not [answer for answer in answers.values() if answer.startswith("WRONG")]
    for question in ("plain chat", "system", "system in the middle", "parts", "prefill"):
        assert answers[question] == "right"


def test_a_directory_of_templates_is_asked(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        CHAT + "{{ raise_exception('no system') if messages[0].role == 'system' }}"
    )
    named = [{"name": "default", "template": CHAT}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    (tmp_path / "config.json").write_text("{}")
    *lines, counts = report([str(tmp_path)])
    assert len(lines) == 2 * len(QUESTIONS)
    assert f"{tmp_path}/chat_template.jinja\tplain chat\tright" in lines
    assert counts == "14 right, 6 refused, 0 WRONG"
