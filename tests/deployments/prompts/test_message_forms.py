"""How models write messages: transcripts of each family, read the same however they are cut."""

import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerFast

from deployments.openai.message_parts import MessageParser, Part
from deployments.openai.tools import Tool
from deployments.prompts.message_forms import form_of
from engine.config import BUNDLED_TARGET, ModelConfig
from engine.models.registry import open_model
from tests.chat_templates import Asked, joined
from tests.deployments import templates

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}})]
OSLO = ("get_weather", {"city": "Oslo", "days": 3})


class Family(NamedTuple):
    """How the chat template writes thoughts and calls, the end of a prompt, an answer, and what it says."""

    written: tuple[str, str]
    prompt: str
    answer: str
    thoughts: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    special: list[str]


FAMILIES = {
    name: Family(**family)
    for name, family in json.loads(Path(__file__).with_name("transcripts.json").read_text(encoding="utf-8")).items()
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    tokenizer = templates.tokenizer_of(templates.family(family.prompt, *family.written))
    tokenizer.add_tokens([AddedToken(text, special=True) for text in family.special])
    return tokenizer


FORMS: dict[str, Any] = {name: form_of(tokenizer_of(family)) for name, family in FAMILIES.items()}


def parts(name: str, pieces: list[str]) -> list[list[Part]]:
    """The parts of each piece."""
    parser = MessageParser(FORMS[name], prompt=FAMILIES[name].prompt, tools=TOOLS)
    return [parser.feed(piece, is_last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_answer_is_read_as_it_is_meant_however_it_is_cut(name: str) -> None:
    family = FAMILIES[name]
    whole = joined(parts(name, [family.answer]))
    thoughts, content, calls = whole
    assert (thoughts, content, [(call, json.loads(text)) for call, text in calls]) == (
        family.thoughts,
        family.content,
        [tuple(call) for call in family.calls],
    )
    for size in (1, 2, 3, 7):
        assert joined(parts(name, [family.answer[i : i + size] for i in range(0, len(family.answer), size)])) == whole
    for cut in range(len(family.answer)):
        assert joined(parts(name, [family.answer[:cut], family.answer[cut:]])) == whole


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].written[1]])
@pytest.mark.parametrize("question", ["call and result", "parallel calls", "thoughts"])
def test_what_a_familys_template_writes_is_read(name: str, question: str) -> None:
    asked = Asked(tokenizer_of(FAMILIES[name]))
    assert asked.answer(question) == "right"


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_the_parts_of_a_piece_do_not_depend_on_how_the_text_before_it_was_cut(name: str, data: st.DataObject) -> None:
    """So a continued stream, which feeds all text before an event at once, has the same events after it."""
    answer = FAMILIES[name].answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), min_size=2, max_size=6)))
    pieces = [answer[a:b] for a, b in itertools.pairwise([0, *cuts, len(answer)])]
    at = data.draw(st.integers(1, len(pieces) - 1))
    assert parts(name, pieces)[at:] == parts(name, ["".join(pieces[:at]), *pieces[at:]])[1:]


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_an_answer_that_a_limit_cuts_anywhere_is_read_the_same_however_it_is_cut(
    name: str, data: st.DataObject
) -> None:
    answer = FAMILIES[name].answer
    answer = answer[: data.draw(st.integers(0, len(answer)))]
    thoughts, content, calls = joined(parts(name, [answer]))
    assert joined(parts(name, [*answer, ""])) == (thoughts, content, calls)
    expected = joined(parts(name, [FAMILIES[name].answer]))
    assert [call[0] for call in calls] == [call[0] for call in expected[2]][: len(calls)]
    assert all(full[1].startswith(cut[1]) for cut, full in zip(calls, expected[2], strict=False))  # never altered


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("qwen3", "<tool_call>\n{not json}\n</tool_call>"),
        ("qwen3.5", "</think><tool_call>\n<function=get_weather>\n<parameter=city>\nOs"),
        ("gemma4", "<|tool_call>call:get_weather{city:Oslo}<tool_call|>"),
        ("mistral-v3", "[TOOL_CALLS][{]"),
        ("glm-4.5", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os"),
    ],
)
def test_a_call_that_is_none_is_content_as_it_is(name: str, answer: str) -> None:
    for pieces in ([answer], [*answer, ""]):
        thoughts, content, calls = joined(parts(name, pieces))
        assert (thoughts, content.removeprefix("</think>"), calls) == ("", answer.removeprefix("</think>"), [])


@pytest.mark.parametrize("begun", ["a <tool_", "<", "<think>Hm \n", "<think>\n", "<think>a</think>\n", "x<tool_call>{"])
def test_text_of_the_prompt_is_not_said_again(begun: str) -> None:
    """Though it could begin a mark."""
    pieces = ["\nb", " c"]
    parser = MessageParser(FORMS["qwen3"], prompt=f"<|im_start|>assistant\n{begun}", tools=TOOLS)
    thoughts, content, _ = joined([parser.feed(piece, is_last=piece == pieces[-1]) for piece in pieces])
    said = "b c" if begun.endswith(">\n") else "\nb c"
    assert (thoughts, content) == ((said, "") if begun.startswith("<think>") and "</" not in begun else ("", said))


def test_constrained_thoughts_begin_where_the_prompt_leaves_them() -> None:
    nemotron = "nemotron: the prompt opens the thoughts after marks that are not known"
    for name, is_open in ((nemotron, True), ("phi4-reasoning", False)):
        thoughts = FORMS[name].thoughts_after(FAMILIES[name].prompt)
        assert thoughts.is_open == is_open


def test_the_bundled_model_can_be_required_to_call() -> None:
    bundled = form_of(open_model(ModelConfig(str(BUNDLED_TARGET))).tokenizer)
    assert bundled.tool_form is not None


def test_a_template_that_says_nothing_known_has_no_form() -> None:
    assert form_of(templates.tokenizer_of(templates.TEMPLATE)) is None
    assert form_of(templates.tokenizer_of(None)) is None
    known = form_of(templates.tokenizer_of("<tool_call></think>"))
    assert "tool_calls" not in known.template["fields"]
    prompt = "<|im_start|>assistant\n"
    shown = templates.family(prompt, "think", "hermes")
    begun = shown.replace(prompt + "{% endif %}", prompt + "<think>\n{% endif %}")  # QwQ: not in earlier answers
    hidden = shown.replace("{{ tool | tojson }}", "")
    other_name = templates.family("[/INST]", "", "mistral").replace("{{ f.name }}", "functions.{{ f.name }}")
    for template, reads_calls in ((shown, True), (begun, True), (hidden, False), (other_name, False)):
        known = form_of(templates.tokenizer_of(template))
        assert ("tool_calls" in (known.template["fields"] if known else {})) == reads_calls


OWN: Any = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*CALL (?P<name>\w+):",
            "close": ";",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def test_a_tokenizers_own_template_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = templates.tokenizer_of(templates.HERMES)
    tokenizer.response_template = OWN
    own = form_of(tokenizer)
    assert own.mark_token_ids == (tokenizer.convert_tokens_to_ids("<|end|>"),)
    answer = "Hm.</think>I look. CALL get_weather:city: Oslo\ndays: 3;<|end|>"
    for pieces in ([answer], [*answer, ""]):
        parser = MessageParser(own, prompt="<|start|>assistant\n<think>", tools=TOOLS)
        fed = [parser.feed(piece, is_last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
        assert joined(fed) == ("Hm.", "I look.", [("get_weather", json.dumps(OSLO[1]))])
    tokenizer.response_template = {"fields": 3}
    assert form_of(tokenizer) == form_of(templates.tokenizer_of(templates.HERMES))
    assert "response_template cannot be used" in caplog.text


def hostile(name: str, num_chars: int = 100_000) -> list[str]:
    """Texts of repeated marks and blanks, which slow readers read in a time that grows with their square or cube."""
    family = FAMILIES[name]
    marks = re.findall(r"<[^<>\s]*>|\[[A-Z_]+\]|\w+", " ".join([family.answer, *family.special]))
    pieces = sorted({*marks, '"', "{", "}", "\\", ":", ";", " ", "\n", '"\\"', '{"', "<", " " * 40, "a" * 40})
    generator = random.Random(name)
    units = ["".join(generator.choices(pieces, k=generator.randint(1, 4))) for _ in range(3)]
    opened = family.answer[: max(map(family.answer.find, marks[len(marks) // 2 :])) + 1]
    units += [max(marks, key=len), '<tool_call>{"\\"', opened]
    return [(unit * num_chars)[:num_chars] for unit in units] + [
        opened + " " * num_chars,
        "<tool_call>f<arg_key>" + " " * num_chars + "</tool_call>",
        "<|tool_call>call:f{" + 'a:<|"|>b<|"|>,' * (num_chars // 14) + "<tool_call|>",
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_takes_long_to_read(name: str) -> None:
    """Mutants: no largest number of a repeat; no pieces; an end looked for again and again; transformers' tags."""
    for text in hostile(name):
        started = time.thread_time()
        parts(name, [text])
        assert time.thread_time() - started < 1, text[:100]
    for text, size in ((hostile(name, 20_000)[0], 4), ("<tool_call>" + " " * 100_000, 7)):
        started = time.thread_time()
        parts(name, [text[start : start + size] for start in range(0, len(text), size)])
        assert time.thread_time() - started < 1, text[:100]
