"""What chat templates read: features of real templates, each rebuilt, and the prompts that they write."""

import hashlib
from typing import Any

import pytest

from deployments.openai.chat import ChatCompletionRequest
from deployments.prompts.conversation import ChatTemplate
from engine.errors import RequestError
from tests.chat_templates import QUESTIONS, Asked, message
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
HERMES = with_call("{{ f | tojson }}").replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
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
DIGESTS = [hashlib.blake2s(call_id.encode()).hexdigest()[:9] for call_id in "xy"]

_OBJECT = '{"a": 1}'
_TEXT = '{"a":  1}'
_FUNCTION = f'{{"name": "f", "arguments": {_OBJECT}}}'


def calls(*ids: str, content: str = "", arguments: str = _TEXT) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    made = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return message("assistant", content, tool_calls=made)


SAID = {
    "S": message("system", "Be brief."),
    "T": message("system", "Be kind."),
    "U": message("user", "Hi"),
    "P": message("user", [{"type": "text", "text": text} for text in ("Hi", " you")]),
    "A": message("assistant", "Yes?"),
    "x": calls("x"),
    "xy": calls("x", "y"),
    "Look": calls("x", content="Look."),
    "none": calls("x", arguments=""),
    "Hm": calls("x") | {"reasoning_content": "Hm."},
    "Hmxy": calls("x", "y") | {"reasoning_content": "Hm."},
    "HmLook": calls("x", content="Look.") | {"reasoning_content": "Hm."},
    "nine": calls("c123456x9"),
    **{f"={call_id}": message("tool", "3", tool_call_id=call_id) for call_id in ("x", "y", "z", "c123456x9")},
    "blankxy": calls("x", "y", content="\n"),
    "blank": message("assistant", " "),
    "spaces": message("user", " Hi\n"),
    "quotes": message("user", 'é "x"\n'),
    "thought": message("assistant", "<think>Hm.</think>Yes?"),
    "thinks": message("assistant", "Yes?<think>Hm."),
}


def prompt_of(template: Any, words: str, **fields: Any) -> str:
    tokenizer = tokenizer_of(None)
    tokenizer.chat_template = template
    request = ChatCompletionRequest.model_validate({"messages": [SAID[word] for word in words.split()], **fields})
    return "".join(text for text, _ in ChatTemplate(tokenizer).render(tokenizer, request, request.messages))


@pytest.mark.parametrize(
    ("template", "words", "prompt"),
    [
        (PARTS, "U", "User: Hi\n"),
        (PARTS, "S U A U", "System: Be brief.\nUser: Hi\nAssistant: Yes?\nUser: Hi\n"),
        (PARTS_OF_USERS, "S U A P", "<system>Be brief.<user>Hi<assistant>Yes?<user>Hi you"),
        (CHAT, "P", "<user>Hi you"),
        (OBJECT, "U x =x", f"<user>Hi<assistant>[f {_OBJECT}]<tool>3"),
        (ITEMS, "U x =x", "<user>Hi<assistant>[f a=1]<tool>3"),
        (CONCATENATED, "U x =x", f"<user>Hi<assistant>[f {_TEXT}]<tool>3"),
        (CONCATENATED, "none", "<assistant>[f {}]"),
        (PRINTED, "U x =x", f"<user>Hi<assistant>[f {_TEXT}]<tool>3"),
        (
            KIMI,
            "xy =x =y x =x",
            f"<assistant>[functions.f:0 {_OBJECT}][functions.f:1 {_OBJECT}]<tool>3 of functions.f:0"
            f"<tool>3 of functions.f:1<assistant>[functions.f:2 {_OBJECT}]<tool>3 of functions.f:2",
        ),
        (KIMI_OWN, "x =x", f"<assistant>[functions.f:0 {_TEXT}]<tool>3 of functions.f:0"),
        (MISTRAL, "nine =c123456x9", f"<assistant>[{_FUNCTION} c123456x9]<tool>3 of c123456x9"),
        (MISTRAL, "x =x =y", f"<assistant>[{_FUNCTION} {DIGESTS[0]}]<tool>3 of {DIGESTS[0]}<tool>3 of {DIGESTS[1]}"),
        (CHAT, "S U T A U", "<system>Be brief.<user>Hi<system>Be kind.<assistant>Yes?<user>Hi"),
        (FIRST_ONLY, "S T U T A", "<system>Be brief.\n\nBe kind.<user>Hi<user>Be kind.<assistant>Yes?"),
        (FIRST_ONLY, "U S", "<user>Hi<user>Be brief."),
        (ALTERNATING, "S U T A U", "<user>Be brief.\n\nBe kind.|Hi<assistant>Yes?<user>Hi"),
        (NO_SYSTEM, "S U A U T", "<user>Be brief.\n\nBe kind.\n\nHi<assistant>Yes?<user>Hi"),
        (NO_SYSTEM, "S", "<user>Be brief."),
        (LAST_SYSTEM, "S U T", "Be brief.<user>Hi<user>Be kind."),
        (AT_LAST_USER, "S U", "<user>Be brief.|Hi"),
        (AT_LAST_USER, "S U x =x", f"<user>Be brief.\n\nHi<assistant>[{_FUNCTION}]<tool>3"),
        (HERMES, "blankxy", f"<assistant>[{_FUNCTION}][{_FUNCTION}]"),
        (ONE_CALL, "Look =x", f"<assistant>Look.<assistant>{_FUNCTION}<tool>3"),
        (
            ONE_CALL,
            "xy =y =x =z A",
            f"<assistant>{_FUNCTION}<tool>3<assistant>{_FUNCTION}<tool>3<tool>3<assistant>Yes?",
        ),
        (ONE_CALL, "xy U =x", f"<assistant>{_FUNCTION}<assistant>{_FUNCTION}<user>Hi<tool>3"),
        (GPT_OSS, "Hmxy", f"<assistant>Hm.{_FUNCTION}<assistant>{_FUNCTION}"),
        (GPT_OSS, "Hm", f"<assistant>Hm.{_FUNCTION}"),
        (GPT_OSS, "HmLook", f"<assistant>Look.{_FUNCTION}"),
        # What a template changes is not left out.
        (FIRST_ONLY, "spaces blank", "<user>Hi<assistant>"),
        (CHAT.replace("m.content", "m.content.split('</think>')[-1]"), "U thought", "<user>Hi<assistant>Yes?"),
        (CHAT.replace("m.content", "m.content.split('<think>')[0]"), "U thinks", "<user>Hi<assistant>Yes?"),
        (CHAT.replace("m.content", "m.content | tojson"), "quotes", '<user>"é \\"x\\"\\n"'),
    ],
)
def test_every_text_is_in_the_prompt(template: str, words: str, prompt: str) -> None:
    assert prompt_of(template, words) == prompt


NO_TOOL = CHAT.replace("messages %}", "messages if m.role != 'tool' %}")
LEFT_OUT = "the chat template leaves out the"


@pytest.mark.parametrize(
    ("template", "words", "sentence"),
    [
        (NO_TOOL, "U A =x", f"{LEFT_OUT} text of messages[2] (role tool)"),
        (CHAT, "U x", f"{LEFT_OUT} arguments of messages[1].tool_calls[0]"),
        (with_call("{{ f.arguments | tojson }}"), "U x", f"{LEFT_OUT} name of messages[1].tool_calls[0]"),
        (with_call("{{ f.name }}"), "U x", f"{LEFT_OUT} arguments of messages[1].tool_calls[0]"),
        ("{{ messages[-1].content }}", "U A", f"{LEFT_OUT} text of messages[0] (role user)"),
        (CHAT.replace("m.content", "m.content[:24]"), "A P", f"{LEFT_OUT} text of messages[1] (role user)"),
        (ALTERNATING, "U U", "the chat template refuses the messages: roles must alternate"),
        (NO_SYSTEM, "S U U", "the chat template refuses the messages: System role not supported"),
        ("{{ raise_exception(messages[0].content) }}", "U", "the chat template refuses the messages: Hi"),
    ],
)
def test_a_prompt_without_a_text_is_refused_by_its_name(template: str, words: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        prompt_of(template, words)
    assert (str(caught.value), caught.value.param) == (sentence, "messages")


TOOLS = [{"type": "function", "function": {"name": "f"}}]
TOOL_USE = "{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}" + CHAT


def test_tools_have_the_fields_that_their_template_needs_and_are_shown() -> None:
    assert prompt_of(TOOL_USE, "U", tools=TOOLS) == "// f<user>Hi"  # gpt-oss
    described = {"type": "function", "function": {"name": "f", "description": "Does "}}
    assert prompt_of(TOOL_USE, "U", tools=[described]) == "// Does f<user>Hi"
    shown = "{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}" + CHAT
    assert prompt_of(shown, "U", tools=TOOLS) == '{"name": "f"}<user>Hi'
    with pytest.raises(RequestError, match=r"leaves out the name of tools\[0\]") as caught:
        prompt_of(CHAT, "U", tools=TOOLS)
    assert caught.value.param == "tools"


def test_named_templates_are_chosen_as_transformers_does() -> None:
    named = {"default": "D" + CHAT, "rag": "R" + CHAT, "tool_use": TOOL_USE}
    assert prompt_of(named, "U") == prompt_of(named, "U", tools=TOOLS, tool_choice="none") == "D<user>Hi"
    assert prompt_of(named, "U", tools=TOOLS) == "// f<user>Hi"
    assert prompt_of({"tool_use": TOOL_USE}, "U") == "<user>Hi"  # no tools are an empty list there
    assert prompt_of({"default": TOOL_USE, "rag": "R"}, "U", tools=TOOLS) == "// f<user>Hi"


def test_a_begun_answer_that_the_prompt_would_not_hold_is_refused() -> None:
    with pytest.raises(RequestError, match="leaves out the arguments"):
        prompt_of(OBJECT, "U Look", continue_final_message=True)


TABLE = PAGE.read_text().partition("## Chat templates")[2].partition("\n\n| ")[2].partition("\n\n")[0]
ROWS = {row.split(" | ")[0].removeprefix("| ") for row in TABLE.splitlines()[2:]}
FEATURES = {
    "content as a list of parts": PARTS,
    "a system message at the start": FIRST_ONLY,
    "the same, and users and answers in turn": ALTERNATING,
    "no system message": NO_SYSTEM,
    "no system message after a result": AT_LAST_USER,
    "one call in an answer, without a text": ONE_CALL,
    "the arguments of calls as text": CONCATENATED,
    "call ids of nine letters": MISTRAL,
    "call ids with the name": KIMI,
    "no answers of tools": NO_TOOL,
}


@pytest.mark.parametrize(("feature", "template"), FEATURES.items())
def test_the_table_says_how_a_feature_is_served(feature: str, template: str) -> None:
    assert FEATURES.keys() | {"everything"} == ROWS
    tokenizer = tokenizer_of(template.replace("messages %}", "messages %}{# tools #}", 1))
    answers = {question: Asked(tokenizer).answer(question) for question in QUESTIONS}
    assert not [answer for answer in answers.values() if answer.startswith("WRONG")]
    for question in ("plain chat", "system", "system in the middle", "parts", "prefill"):
        assert answers[question] == "right"
