"""What other servers' own test suites assert, over real HTTP: one server for all, and the official client.

Each case has the name of the original.
Where an original asserts its own words, or the words of its model, the test asserts that field, value and limit are
named.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.config import AppConfig
from tests.deployments.fakes import VOCAB_SIZE, Rig
from tests.deployments.serving import serving
from tests.deployments.templates import HERMES, save_tokenizer

USER: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 8}
COMPLETION: Any = {"model": "tiny", "prompt": "I believe the meaning of life is", "temperature": 0, "max_tokens": 8}
VARIED: Any = {"temperature": 1, "seed": 3, "extra_body": {"repetition_penalty": 2.0}}
LONG: Any = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}] * 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Rig]]:
    path = tmp_path_factory.mktemp("tiny")
    answer = "<|start|>assistant\n"
    save_tokenizer(HERMES.removesuffix(answer) + "{% if add_generation_prompt %}" + answer + "{% endif %}", path)
    config = AppConfig(target_model=str(path), served_model_name="tiny", stream_interval_s=0)
    with serving(config, path) as served:
        yield served


@pytest.fixture(scope="module")
def sdk(server: tuple[str, Rig]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def http(server: tuple[str, Rig]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("original", "fields", "named"),
    [
        # vLLM tests/entrypoints/openai
        ("chat_stop_token_ids_out_of_vocab", {"stop_token_ids": [VOCAB_SIZE + 1]}, (VOCAB_SIZE + 1, 258)),
        ("chat_logit_bias_invalid", {"logit_bias": {str(VOCAB_SIZE + 1): 1.0}}, (VOCAB_SIZE + 1, 258)),
        ("chat_logit_bias_multiple_non_integer_keys", {"logit_bias": {"bad1": 5, "bad2": 2}}, ("bad1", "bad2")),
        ("cache_salt_still_validated_on_dict", {"cache_salt": ""}, ("cache_salt",)),
        # llama.cpp tools/server/tests/unit
        ("test_context_size_exceeded", {"messages": LONG}, ("messages", "512")),
        # SGLang test/registered/openai_server
        (
            "test_input_length_longer_than_maximum_allowed_length",
            {"messages": [{"role": "user", "content": "hello " * 84}]},
            ("messages", "512"),
        ),
        ("test_max_tokens_validation", {"max_tokens": 1200}, ("max_tokens", "1,200", "512")),
    ],
)
def test_a_refusal_names_field_and_limit(
    http: httpx.Client, original: str, fields: dict[str, Any], named: tuple[object, ...]
) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400, original
    error = response.json()["error"]
    assert {"message", "type", "code", "param"} <= error.keys()
    assert all(str(part) in error["message"] for part in named), error["message"]


# vLLM: test_chat_logit_bias_valid, test_chat_stop_token_ids_valid, test_nonempty_prompt_list_ok
def test_the_last_id_may_be_named(sdk: openai.OpenAI) -> None:
    last = VOCAB_SIZE - 1
    assert sdk.chat.completions.create(**CHAT, logit_bias={str(last): 1}).choices[0].message.content
    assert sdk.chat.completions.create(**CHAT, extra_body={"stop_token_ids": [last]}).choices[0].message.content
    assert sdk.completions.create(**{**COMPLETION, "prompt": ["hello"]}).choices


# vLLM basic/test_return_token_ids.py: test_basic_completion_with_emoji, test_chat_completion_with_emoji_and_token_ids
def test_token_ids_come_when_asked(sdk: openai.OpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = "I love coding 🚀"
    options = {**COMPLETION, "prompt": prompt, "logprobs": 1}
    completion: Any = sdk.completions.create(**options, extra_body={"return_token_ids": True})
    assert completion.choices[0].prompt_token_ids == tokenizer.encode(prompt)
    assert tokenizer.decode(completion.choices[0].token_ids) == completion.choices[0].text
    without = sdk.completions.create(**options, extra_body={"return_token_ids": False}).model_dump()
    assert "token_ids" not in without["choices"][0]
    stream = sdk.chat.completions.create(**CHAT, stream=True, extra_body={"return_token_ids": True})
    chunks: list[Any] = list(stream)
    assert "hello" in tokenizer.decode(chunks[0].prompt_token_ids)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert tokenizer.decode(ids) == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
