"""Structured outputs through HTTP: the text matches, and what cannot be matched is refused before it is queued."""

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from deployments.openai.structured_output import Thoughts
from engine.params import SamplingParams
from engine.sampling.grammar import Grammars
from tests.deployments.requests import text_of
from tests.deployments.thinking import BIAS, ONE
from tests.engine.conftest import VOCAB, save_llama
from tests.engine.grammars import GRAMMARS, matches
from tests.engine.running import drafters, make_engine, run
from tests.engine.tiny import backend_of
from tests.engine.tokenizers import END, json_tokenizer, saved

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


NESTED = r"\(*[0-9]\)*"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d\d"}, r"[a-c]{3}-\d\d"),
        ({"regex": r"(yes|no)!?"}, r"(yes|no)!?"),
        ({"regex": r"é+ü"}, r"é+ü"),
        ({"choice": ["red", "redder", 'q"\\/\n\x7f\x00']}, 'red|redder|q"\\\\/\n\x7f\x00'),
        ({"choice": ["ü"]}, "ü"),
        ({"grammar": 'root ::= "(" root ")" | [0-9]'}, NESTED),
        ({"grammar": 'start: "(" start ")" | /[0-9]/'}, NESTED),
        ({"json": SCHEMA}, None),
        ({"json": json.dumps(SCHEMA)}, None),
    ],
)
async def test_a_text_is_what_its_constraint_allows(
    constraint: Any, pattern: str | None, client: httpx.AsyncClient
) -> None:
    for temperature, seed in ((100, 3), (100, 1)) if pattern else ((0, 4), (1, 4)):
        text = await text_of(client, structured_outputs=constraint, temperature=temperature, seed=seed)
        if pattern is None:
            jsonschema.validate(json.loads(text), SCHEMA)
            continue
        assert re.fullmatch(pattern, text)
        assert text.count("(") == text.count(")")


MESSAGES = [{"role": "user", "content": "x"}]


IDS = json_tokenizer().get_vocab()
WAYS = {
    "a token": Thoughts("{", "}}", {"}}": IDS["}}"]}),
    "a token, and what begins an answer": Thoughts("{", "}}:", {"}}": IDS["}}"], "],": IDS["],"]}, "],a"),
    "text": Thoughts("{", "}", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A target, a draft, and a function that makes grammars for one of them."""
    paths = [save_llama(tmp_path_factory.mktemp("model"), seed=seed, layers=1, hidden=16) for seed in (1, 2)]
    source = saved(json_tokenizer(), tmp_path_factory.mktemp("json"))
    return *map(backend_of, paths), lambda: Grammars(source, vocab_size=VOCAB, eos_token_ids=[END])


@pytest.mark.parametrize("way", WAYS)
def test_thoughts_are_free_and_the_answer_matches_whatever_is_drafted(way: str, models: Any) -> None:
    """Also after the loss of every matcher, and of requests' blocks."""
    target, draft, make_grammars = models
    thoughts, text_of_tokens = replace(WAYS[way], is_open=True), json_tokenizer().decode
    prompts = torch.randint(2, VOCAB, (6, 9), generator=torch.Generator().manual_seed(5)).tolist()
    bias = {IDS["}}"]: 2.0, IDS['"}']: 1.0, END: 3.0}
    free = [(prompt, SamplingParams(seed=i, max_tokens=60, logit_bias=bias)) for i, prompt in enumerate(prompts)]
    asked = [(prompt, replace(it, grammar=thoughts.before(GRAMMARS["json"], {END}))) for prompt, it in free]
    expected = run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), asked)
    for kind in ("the target itself", "a random draft", "trees by the target itself"):
        drafter, ours = drafters(target, draft, make_grammars())[kind], make_grammars()
        engine = make_engine(target, drafter, grammars=ours, num_speculative_tokens=4, num_blocks=40, block_size=4)
        assert run(engine, asked, between=lambda *_, lost=ours: lost._matchers.clear()) == expected, kind
        assert engine.stats.num_preemptions
    plain = run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), free)
    num_answers = 0
    for index, tokens in expected.items():
        if way == "text":
            ended = next((n for n in range(len(tokens)) if "}" in text_of_tokens(tokens[: n + 1])), len(tokens))
            answer = text_of_tokens(tokens).partition("}")[2]
        else:
            ended = tokens.index(IDS["}}"]) if IDS["}}"] in tokens else len(tokens)
            answer = text_of_tokens(tokens[ended:])
            assert answer[:3].startswith(thoughts.closing[: len(answer)])
            answer = answer[len(thoughts.closing) :].lstrip()
            assert answer[:3].startswith(thoughts.answer[: len(answer)])
            answer = answer[len(thoughts.answer) :]
        never = next((n for n, token in enumerate(plain[index]) if token in (0, END, IDS["}}"])), len(tokens))
        assert tokens[: min(ended, never)] == plain[index][: min(ended, never)]
        assert END not in tokens or ended < len(tokens)
        if tokens[-1] == END:
            assert matches("json", answer.removesuffix("</s>").lstrip())
            num_answers += 1
    assert num_answers


ASKED: Any = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": ONE}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]


@pytest.mark.parametrize(("thinks", "kinds"), [(None, {True}), (False, {False}), (True, {True, False})])
async def test_an_answer_matches_after_thoughts(
    thinking: httpx.AsyncClient, thinks: bool | None, kinds: set[bool]
) -> None:
    """The prompt has begun them, or ended them, or the model decides."""
    state = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
    seen = set()
    for seed in range(4):
        body = {"messages": MESSAGES, "seed": seed, "logit_bias": BIAS, "temperature": 1, **state}
        for fields in ASKED:
            choice = (await thinking.post("/v1/chat/completions", json=body | fields)).json()["choices"][0]
            message = choice["message"]
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            (answer,) = calls if "tools" in fields else [message["content"]]
            jsonschema.validate(json.loads(answer), ONE)
            seen.add("reasoning_content" in message)
            if thinks is None and "tools" not in fields:
                free = {**body, "max_tokens": len(message["reasoning_content"]) + 1}
                said = (await thinking.post("/v1/chat/completions", json=free)).json()["choices"][0]["message"]
                assert said["reasoning_content"] == message["reasoning_content"]
    assert seen == kinds
