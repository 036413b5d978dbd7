"""What other servers' own test suites assert, over real HTTP: one server for all, and the official client.

Each case has the name of the original.
Where an original asserts its own words, or the words of its model, the test asserts that field, value and limit are
named.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def text_of(http: httpx.Client, token_ids: list[int]) -> str:
    text: str = http.post("/detokenize", json={"tokens": token_ids}).json()["prompt"]
    return text


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


# vLLM completion/test_completion_text_offset.py: test_stream_text_offset_matches_non_stream_with_stop_holdback
def test_offsets_are_those_of_the_whole_where_a_stop_string_holds_text_back(sdk: openai.OpenAI) -> None:
    options = {**COMPLETION, "logprobs": 0, "stop": ["\n\n", "never"]}
    whole = sdk.completions.create(**options).choices[0].logprobs
    offsets: list[int] = []
    for chunk in sdk.completions.create(**options, stream=True):
        assert chunk.choices[0].logprobs is not None
        offsets += chunk.choices[0].logprobs.text_offset or []
    assert whole is not None
    assert offsets == whole.text_offset == list(range(8))


# llama.cpp test_completion.py: test_completion_parallel_slots (six at once)
def test_texts_at_once_are_those_of_one_after_the_other(sdk: openai.OpenAI) -> None:
    prompts = ["Write a very long book.", "Write another a poem.", "What is LLM?", "The sky is blue", "Joke", "Song"]

    def text(prompt: str) -> str:
        options = {**COMPLETION, "prompt": prompt, "seed": 42, "temperature": 1.0, "max_tokens": 60}
        return sdk.completions.create(**options).choices[0].text

    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, prompts)) == alone
    assert all(len(text) > 10 for text in alone)


# llama.cpp test_completion.py: test_logit_bias; test_chat_completion.py: test_logit_bias
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bias_keeps_tokens_out(http: httpx.Client, path: str) -> None:
    body = COMPLETION if path == "/v1/completions" else CHAT
    plain = http.post(path, json={**body, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    bias = dict.fromkeys(map(str, plain), -100)
    biased = http.post(path, json={**body, "return_token_ids": True, "logit_bias": bias}).json()["choices"][0]
    assert not set(plain) & set(biased["token_ids"])


# vLLM: test_chat_logit_bias_valid, test_chat_stop_token_ids_valid, test_nonempty_prompt_list_ok
def test_the_last_id_may_be_named(sdk: openai.OpenAI) -> None:
    last = VOCAB_SIZE - 1
    assert sdk.chat.completions.create(**CHAT, logit_bias={str(last): 1}).choices[0].message.content
    assert sdk.chat.completions.create(**CHAT, extra_body={"stop_token_ids": [last]}).choices[0].message.content
    assert sdk.completions.create(**{**COMPLETION, "prompt": ["hello"]}).choices


# SGLang test/kits/matched_stop_kit.py: test_finish_stop_str, test_finish_stop_eos, test_finish_length, for both APIs
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_why_a_text_ended(http: httpx.Client, path: str) -> None:
    body = COMPLETION if path == "/v1/completions" else CHAT

    def choice(**fields: Any) -> Any:
        return http.post(path, json={**body, **fields}).json()["choices"][0]

    def text(choice: Any) -> str:
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    length = choice()
    letter = text(length)[4]
    stop = choice(stop=letter, max_tokens=100)
    end = choice(logit_bias={"256": 100}, max_tokens=100)
    token = choice(stop_token_ids=[ord(letter) - 33])
    assert (length["finish_reason"], length["stop_reason"]) == ("length", None)
    assert (stop["finish_reason"], stop["stop_reason"]) == ("stop", letter)
    assert (end["finish_reason"], end["stop_reason"], text(end)) == ("stop", None, "")
    assert (token["finish_reason"], token["stop_reason"]) == ("stop", ord(letter) - 33)
    assert letter not in text(stop)


# vLLM basic/test_basic.py: test_request_cancellation; llama.cpp test_completion.py: test_cancel_request
def test_requests_that_nobody_waits_for_take_nothing(server: tuple[str, Rig], sdk: openai.OpenAI) -> None:
    url, rig = server
    rig.verifier.gate.clear()
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=0.5) as hasty:

            def request(_: int) -> type[BaseException] | None:
                try:
                    hasty.chat.completions.create(**{**CHAT, "max_tokens": 400}, extra_body={"min_tokens": 400})
                except openai.APITimeoutError as error:
                    return type(error)
                return None

            with ThreadPoolExecutor(20) as pool:
                assert set(pool.map(request, range(20))) == {openai.APITimeoutError}
    finally:
        rig.verifier.gate.set()
    assert sdk.with_options(timeout=5).chat.completions.create(**CHAT).choices
    assert rig.engine.num_requests == 0


# vLLM completion/test_completion.py: test_completion_stream_options
def test_when_a_stream_of_completions_reports_usage(sdk: openai.OpenAI) -> None:
    for options, in_chunks, in_the_end in (
        ({"include_usage": False, "continuous_usage_stats": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({}, False, False),
    ):
        stream = sdk.completions.create(**COMPLETION, stream=True, stream_options=options)  # type: ignore[call-overload]
        chunks = list(stream)
        assert [chunk.usage is not None for chunk in chunks if chunk.choices] == [in_chunks] * 8
        assert [chunk.usage is not None for chunk in chunks if not chunk.choices] == [True] * in_the_end
        for usage in (chunk.usage for chunk in chunks if chunk.usage):
            assert usage.prompt_tokens > 0
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for options in ({"include_usage": None}, {"continuous_usage_stats": None}, {"continuous_usage_stats": True}):
        with pytest.raises(openai.BadRequestError):
            sdk.completions.create(**COMPLETION, stream=False, stream_options=options)  # type: ignore[call-overload]


# vLLM completion/test_completion.py: test_parallel_no_streaming, test_parallel_streaming
def test_several_texts_for_one_prompt(sdk: openai.OpenAI) -> None:
    options: Any = {**COMPLETION, "n": 3, "max_tokens": 30, **VARIED}
    whole = sdk.completions.create(**options, logprobs=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in whole.choices)
    texts, ends = ["", "", ""], Counter[int]()
    for chunk in sdk.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert ends == {0: 1, 1: 1, 2: 1}
    assert texts == [choice.text for choice in whole.choices]


# vLLM completion/test_completion.py: test_batch_completions
def test_copies_of_a_prompt_have_the_same_text(sdk: openai.OpenAI) -> None:
    for prompts in (["Hello, my name is"] * 2, [[0, 0, 0, 0, 0]] * 2):
        batch = sdk.completions.create(**{**COMPLETION, "prompt": prompts})
        assert len(batch.choices) == 2
        assert batch.choices[0].text == batch.choices[1].text
        texts = ["", ""]
        for chunk in sdk.completions.create(**{**COMPLETION, "prompt": prompts}, stream=True):
            assert len(chunk.choices) == 1
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts[0] == texts[1] == batch.choices[0].text


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


# vLLM chat_completion/test_chat.py: test_no_logprobs_chat, test_single_chat_session, test_chat_streaming
def test_a_conversation_goes_on(sdk: openai.OpenAI) -> None:
    first = sdk.chat.completions.create(**CHAT, logprobs=False)
    assert first.choices[0].logprobs is None
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.prompt_tokens + 8
    answer = first.choices[0].message
    assert answer.role == "assistant"
    more = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "in json"}]
    options = {**CHAT, "messages": more}
    whole = sdk.chat.completions.create(**options)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > first.usage.prompt_tokens
    deltas = [chunk.choices[0] for chunk in sdk.chat.completions.create(**options, stream=True)]
    assert "".join(delta.delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].delta.content


# llama.cpp test_chat_completion.py: test_chat_template_assistant_prefill (text, parts), which it does unasked; SGLang
# basic/test_openai_server.py: test_response_prefill
@pytest.mark.parametrize("parts", [["Whill"], ["Wh", "ill"]], ids=str)
def test_an_answer_that_has_begun_goes_on(http: httpx.Client, parts: list[str]) -> None:
    prefill = parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]
    messages = [*USER, {"role": "assistant", "content": prefill}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    body = http.post("/v1/chat/completions", json={**CHAT, **fields, "return_token_ids": True}).json()
    assert text_of(http, body["prompt_token_ids"]).endswith("assistant\nWhill")
    assert body["choices"][0]["message"]["content"]
