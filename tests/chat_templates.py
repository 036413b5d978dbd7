"""Questions to chat templates: is a conversation served right, or refused by a sentence?

`python -m tests.families templates DIR...` asks every *.jinja and tokenizer_config.json under the directories.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.message_parts import CallArguments, CallStart, Content, MessageParser, Part, Reasoning
from deployments.openai.tools import THOUGHTS, Tool
from deployments.prompts.conversation import ChatTemplate, answer_in
from deployments.prompts.message_forms import form_of
from engine.errors import RequestError
from tests.fakes import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
SPECIAL = re.compile(
    r"</?s>|<\|[^|<>'\s]{1,40}\|>|<\uff5c[^\uff5c<>']{1,40}\uff5c>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_\w+>|<SPECIAL_\d+>"
)


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calls(*cities: str, content: Any = None) -> dict[str, Any]:
    """An answer that calls; its ids are those of another server."""
    arguments = [json.dumps({"city": city, "days": 3}) for city in cities]
    functions = [{"name": "get_weather", "arguments": text} for text in arguments]
    made = [
        {"id": f"call_{city}", "type": "function", "function": f} for city, f in zip(cities, functions, strict=True)
    ]
    return message("assistant", content, tool_calls=made)


SYSTEM, USER, ANSWER = message("system", "Be brief."), message("user", "What is 2+2?"), message("assistant", "It is 4.")
RESULT = message("tool", "Rain, 3 degrees", tool_call_id="call_Oslo")
QUESTIONS: dict[str, dict[str, Any]] = {
    "plain chat": {"messages": [USER, ANSWER, message("user", "And 3+3?")]},
    "system": {"messages": [SYSTEM, USER, ANSWER, message("user", "And 3+3?")]},
    "system in the middle": {
        "messages": [SYSTEM, USER, message("system", "Say please."), ANSWER, message("user", "?")]
    },
    "system after the user": {"messages": [USER, SYSTEM]},
    "parts": {"messages": [message("user", [{"type": "text", "text": text} for text in ("What is", " 2+2?")])]},
    "call and result": {"messages": [SYSTEM, USER, calls("Oslo", content="I look."), RESULT], "tools": [TOOL]},
    "call, no tools": {"messages": [USER, calls("Oslo"), RESULT]},
    "parallel calls": {
        "messages": [USER, calls("Oslo", "Bern"), RESULT, message("tool", "Sun", tool_call_id="call_Bern")],
        "tools": [TOOL],
    },
    "thoughts": {"messages": [USER, message("assistant", "It is 4.", reasoning_content="Two and two.")]},
    "prefill": {
        "messages": [USER, message("assistant", "It is")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


def joined(fed: list[list[Part]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls, joined as clients join the deltas."""
    texts = {Reasoning: "", Content: ""}
    calls: list[tuple[str, str]] = []
    for part in itertools.chain(*fed):
        match part:
            case CallStart():
                assert part.index == len(calls)
                calls.append((part.name, ""))
            case CallArguments():
                assert part.index == len(calls) - 1
                calls[-1] = calls[-1][0], calls[-1][1] + part.text
            case _:
                texts[type(part)] += part.text
    return texts[Reasoning], texts[Content], calls


class Asked:
    """A tokenizer with a chat template, and what is asked of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.template, self.form = tokenizer, ChatTemplate(tokenizer), form_of(tokenizer)

    def answer(self, question: str) -> str:
        """`right`, `refused: ` and the sentence, or `WRONG: ` and what."""
        body = QUESTIONS[question]
        try:
            if body.get("tools") and not (self.form and "tool_calls" in self.form.template["fields"]):
                return "refused: takes no tools, or in an unknown form"
            prompt = self.render(**body)
        except RequestError as error:
            return f"refused: {error}"
        except Exception as error:  # noqa: BLE001  # the server would answer 500
            return f"WRONG: {error!r}"
        lost = next((text for text in _texts(body["messages"]) if not _is_in(text, prompt)), None)
        if lost is not None:
            return f"WRONG: {lost!r} is not in {prompt!r}"
        if question == "prefill":
            return "right" if prompt.endswith("It is") else f"WRONG: does not end the prompt {prompt!r}"
        return self.read_back(body) if question in ("call and result", "parallel calls", "thoughts") else "right"

    def read_back(self, body: dict[str, Any]) -> str:
        """Whether the last answer, as the template writes it, is read as it is meant."""
        last = max(i for i, entry in enumerate(body["messages"]) if entry["role"] == "assistant")
        before, whole = (
            self.render(**{**body, "messages": messages, "add_generation_prompt": begins})
            for messages, begins in ((body["messages"][:last], True), (body["messages"][: last + 1], False))
        )
        before, answer = answer_in(before, whole, self.tokenizer.all_special_tokens)
        # An answer that became several messages is read to the end of each.
        header = re.search(rf"((?:{SPECIAL.pattern})\w*(?:{SPECIAL.pattern})?\s*)(?:<think>\s*)?\Z", before)
        entry = body["messages"][last]
        first, *others = answer.split(header[1]) if header and "tool_calls" in entry else [answer]
        read = [self.read(before, first), *(self.read(header[1] if header else "", text) for text in others)]
        called = [json.loads(text) for _, _, parts in read for _, text in parts]
        if called != [json.loads(call["function"]["arguments"]) for call in entry.get("tool_calls", ())]:
            return f"WRONG: calls read from {answer!r}: {called}"
        knows_thoughts = self.form is not None and THOUGHTS & self.form.template["fields"].keys()
        if "reasoning_content" not in entry or not knows_thoughts or "Two and two." not in answer:
            return "right"
        thoughts, content, _ = read[0]
        is_read = (thoughts.strip(), content.strip()[:8]) == ("Two and two.", "It is 4.")
        return "right" if is_read else f"WRONG: {thoughts!r} and {content!r} read from {answer!r}"

    def read(self, prompt: str, answer: str) -> tuple[str, str, list[tuple[str, str]]]:
        if self.form is None:
            return "", answer, []
        parser = MessageParser(self.form, prompt=prompt, tools=[Tool.model_validate(TOOL)])
        return joined([parser.feed(answer, is_last=True)])

    def render(self, **body: Any) -> str:
        request = ChatCompletionRequest.model_validate(body)
        return "".join(text for text, _ in self.template.render(self.tokenizer, request, request.messages))


def _texts(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    for entry in messages:
        content = entry["content"] or ""
        yield "".join(part["text"] for part in content) if isinstance(content, list) else content
        for call in entry.get("tool_calls", ()):
            yield call["function"]["name"]
            yield json.loads(call["function"]["arguments"])["city"]


def _is_in(text: str, prompt: str) -> bool:
    return text in prompt or json.dumps(text)[1:-1] in prompt


def tokenizer_with(chat_template: Any, special: Sequence[str] = (), **names: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), **{"bos_token": "<s>", "eos_token": "</s>"} | names
    )
    texts = list(chat_template.values()) if isinstance(chat_template, dict) else [chat_template]
    found = {token for text in texts for token in SPECIAL.findall(text)}
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(found.union(special))])
    tokenizer.chat_template = chat_template
    return tokenizer


def load(path: Path) -> PreTrainedTokenizerFast | None:
    """A tokenizer with the template of a file; None if it has none."""
    if path.suffix == ".jinja":
        return tokenizer_with(path.read_text(encoding="utf-8"))
    config = json.loads(path.read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
    names = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}
    special = [token["content"] for token in config.get("added_tokens_decoder", {}).values() if token.get("special")]
    return tokenizer_with(template, special, **names) if template else None


def report(folders: Sequence[str]) -> Iterator[str]:
    """A line for each template and question, and a line of counts."""
    answers: list[str] = []
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("*"))]
    for path in paths:
        if path.suffix != ".jinja" and path.name != "tokenizer_config.json":
            continue
        if (tokenizer := load(path)) is not None:
            asked = Asked(tokenizer)
            for question in QUESTIONS:
                answers.append(asked.answer(question))
                yield f"{path}\t{question}\t{answers[-1]}"
    counts = {word: sum(answer.startswith(word) for answer in answers) for word in ("right", "refused", "WRONG")}
    yield ", ".join(f"{count} {word}" for word, count in counts.items())
