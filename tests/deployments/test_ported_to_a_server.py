"""More of what other servers' own test suites assert, over real HTTP: one server for all, and the official client.

Each case has the name of the original. `test_ported.py` has those that look at log probabilities, usage and tools.
Those that do not hold here are in `OTHERWISE_HERE`, with the reason. Where an original asserts its own words, or the
words of its model, the test asserts that field, value and limit are named.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from deployments.config import AppConfig
from tests.deployments.fakes import VOCAB_SIZE, Rig
from tests.deployments.serving import serving
from tests.deployments.templates import HERMES, save_tokenizer

USER: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 8}
COMPLETION: Any = {"model": "tiny", "prompt": "I believe the meaning of life is", "temperature": 0, "max_tokens": 8}
WEATHER: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
]
CHATS = "/v1/chat/completions"
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


# --- What is refused, and how ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "path", "fields", "named"),
    [
        # vLLM tests/entrypoints/openai
        ("chat_stop_token_ids_out_of_vocab", "chat", {"stop_token_ids": [VOCAB_SIZE + 1]}, (VOCAB_SIZE + 1, 258)),
        ("chat_stop_token_ids_negative", "chat", {"stop_token_ids": [-1]}, ("stop_token_ids",)),
        ("chat_logit_bias_invalid", "chat", {"logit_bias": {str(VOCAB_SIZE + 1): 1.0}}, (VOCAB_SIZE + 1, 258)),
        ("chat_logit_bias_non_integer_key", "chat", {"logit_bias": {"not_a_token_id": 50}}, ("not_a_token_id",)),
        ("chat_logit_bias_non_numeric_value", "chat", {"logit_bias": {"1": "not_a_number"}}, ("logit_bias.1",)),
        ("cache_salt_still_validated_on_dict", "chat", {"cache_salt": ""}, ("cache_salt",)),
        ("invalid_tool_choice_is_still_rejected", "chat", {"tools": WEATHER, "tool_choice": "bogus"}, ("tool_choice",)),
        ("invalid_tool_choice_is_still_rejected (no tools)", "chat", {"tool_choice": "auto"}, ("tool_choice",)),
        ("json_schema_missing_schema", "chat", {"response_format": {"type": "json_schema"}}, ("json_schema",)),
        ("empty_prompt_list_rejected", "completions", {"prompt": []}, ("prompt",)),
        # llama.cpp tools/server/tests/unit
        ("test_context_size_exceeded", "chat", {"messages": LONG}, ("messages", "512")),
        ("test_context_size_exceeded_stream", "chat", {"messages": LONG, "stream": True}, ("messages", "512")),
        (
            "test_local_media_file",
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///a.png"}}]}]},
            ("messages.0.content.0.type",),
        ),
        # SGLang test/registered/openai_server
        (
            "test_input_length_longer_than_maximum_allowed_length",
            "chat",
            {"messages": [{"role": "user", "content": "hello " * 84}]},
            ("messages", "512"),
        ),
        ("test_max_tokens_validation", "chat", {"max_tokens": 1200}, ("max_tokens", "1,200", "512")),
        ("test_error", "responses", {"previous_response_id": "bad"}, ("previous_response_id",)),
        ("test_invalid_tools_error", "responses", {"tools": [{"type": "some_invalid_tool_type"}]}, ("tools.0",)),
    ],
)
def test_a_refusal_names_field_and_limit(
    http: httpx.Client, original: str, path: str, fields: dict[str, Any], named: tuple[object, ...]
) -> None:
    base = {"chat": CHAT, "completions": COMPLETION, "responses": {"input": "Hi"}}[path]
    response = http.post(f"/v1/{path.replace('chat', 'chat/completions')}", json={**base, **fields})
    assert response.status_code == 400, original
    error = response.json()["error"]
    assert {"message", "type", "code", "param"} <= error.keys()
    assert all(str(part) in error["message"] for part in named), error["message"]


# vLLM chat_completion/test_non_object_body_validation.py (four bodies)
@pytest.mark.parametrize("body", ["this is not valid json{{{", ["not", "an", "object"], 42, None])
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, body: Any) -> None:
    assert http.post("/v1/chat/completions", json=body).status_code == 400


# vLLM basic/test_basic.py: test_request_wrong_content_type
def test_a_form_is_refused(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(**CHAT, extra_headers={"Content-Type": "application/x-www-form-urlencoded"})


# SGLang validation/test_strict_model_validation.py: chat, completion, valid name; their 400 is OpenAI's 404
def test_a_model_has_one_name(sdk: openai.OpenAI) -> None:
    for create, options in ((sdk.chat.completions.create, CHAT), (sdk.completions.create, COMPLETION)):
        make: Any = create
        with pytest.raises(openai.NotFoundError, match=r"'wrong_model_name'.*'tiny'"):
            make(**{**options, "model": "wrong_model_name"})
        assert make(**options).choices


# SGLang basic/test_openai_server.py: test_model_list, test_retrieve_model
def test_models_are_listed_and_found(sdk: openai.OpenAI) -> None:
    [model] = sdk.models.list()
    assert isinstance((model.model_extra or {})["max_model_len"], int)
    assert sdk.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("non-existent-model")


# vLLM basic/test_basic.py: test_show_version, test_check_health
def test_version_and_health(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    assert http.get("/health").status_code == 200


# --- Completions ----------------------------------------------------------------------------------------------------


# llama.cpp test_completion.py: test_completion_stream_vs_non_stream, test_completion_stream_with_openai_library_stops
@pytest.mark.parametrize("stops", [False, True])
def test_a_stream_has_the_text_of_the_whole(sdk: openai.OpenAI, stops: bool) -> None:
    stop = {"stop": [sdk.completions.create(**COMPLETION).choices[0].text[3:5], "User:\n"]} if stops else {}
    whole = sdk.completions.create(**COMPLETION, **stop).choices[0]
    chunks = [chunk.choices[0] for chunk in sdk.completions.create(**COMPLETION, **stop, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(whole.text) == (3 if stops else 8)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]


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


# llama.cpp test_completion.py: test_n_probs_stream; test_chat_completion.py: test_logprobs_stream
def test_each_chunk_has_the_log_probabilities_of_its_tokens(sdk: openai.OpenAI) -> None:
    chunks = [chunk.choices[0] for chunk in sdk.completions.create(**COMPLETION, logprobs=10, stream=True)]
    assert all(chunk.logprobs and len(chunk.logprobs.tokens or []) == 1 for chunk in chunks)
    text = read = ""
    for chunk in sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=10, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        for token in (choice.logprobs and choice.logprobs.content) or []:
            read += token.token
            assert token.logprob <= 0
            assert token.bytes is not None
            assert len(token.top_logprobs) == 10
    assert read == text != ""


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
    assert (rig.engine.num_running, rig.engine.num_waiting) == (0, 0)


# --- Chat -----------------------------------------------------------------------------------------------------------


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


# vLLM chat_completion/test_chat_error.py: test_system_message_accepts_text, test_system_message_accepts_text_array
def test_a_system_message_is_text_or_parts_of_it(http: httpx.Client) -> None:
    counts = set()
    for content in ("You are", [{"type": "text", "text": "You"}, {"type": "text", "text": " are"}]):
        messages = [{"role": "system", "content": content}, *USER]
        answer = http.post("/v1/chat/completions", json={**CHAT, "messages": messages}).json()
        counts.add(answer["usage"]["prompt_tokens"])
    assert len(counts) == 1


# vLLM chat_completion/test_tool_choice_null.py: null is no choice, with tools, without, with a form; none is untouched
def test_no_choice_of_a_tool_is_automatic(http: httpx.Client) -> None:
    def answer(**fields: Any) -> Any:
        return http.post("/v1/chat/completions", json={**CHAT, **fields}).json()["choices"]

    assert answer(tools=WEATHER, tool_choice=None) == answer(tools=WEATHER) == answer(tools=WEATHER, tool_choice="auto")
    assert answer(tool_choice=None) == answer()
    [formed] = answer(structured_outputs={"json": {"const": 42}}, tool_choice=None)
    assert formed["message"]["content"] == "42"
    assert answer(tools=WEATHER, tool_choice="none") == answer()


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


# llama.cpp test_chat_completion.py: test_chat_completions_multiple_choices
def test_choices_have_a_role_each(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(**CHAT, n=2)
    assert [(choice.message.role, choice.finish_reason) for choice in chat.choices] == [("assistant", "length")] * 2


# SGLang features/test_json_mode.py: test_json_mode_response, test_json_mode_with_streaming; llama.cpp
# test_chat_completion.py: test_completion_with_grammar, test_completion_with_json_schema
def test_a_form_holds_whole_and_in_a_stream(sdk: openai.OpenAI) -> None:
    options: Any = {**CHAT, "max_tokens": 200}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, expected in (
        ({"response_format": form}, {"a": 1}),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "1" "2"{5,5}'}}}, 122222),
        ({"extra_body": {"structured_outputs": {"json": {"const": "42"}}}}, "42"),
    ):
        whole = sdk.chat.completions.create(**options, **fields).choices[0].message.content
        chunks = sdk.chat.completions.create(**options, **fields, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert json.loads(whole or "") == expected


# --- Responses ------------------------------------------------------------------------------------------------------


# SGLang basic/test_openai_server.py: test_response, test_response_stream, test_penalty (responses)
def test_a_response_has_its_fields(sdk: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "input": "The capital of France is",
        "temperature": 0,
        "top_p": 1,
        "max_output_tokens": 8,
        "store": True,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "truncation": "disabled",
        "user": "u",
        "metadata": {"a": "b"},
        "extra_body": {"frequency_penalty": 1.0},
    }
    response = sdk.responses.create(**options)
    assert (response.object, response.model, response.error) == ("response", "tiny", None)
    assert response.created_at
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    with sdk.responses.stream(**{name: value for name, value in options.items() if name != "store"}) as stream:
        events = [*stream]
    types = [event.type for event in events]
    last: Any = events[-1]
    assert last.response.output_text == response.output_text
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.incomplete"  # as OpenAI says of a text that its length ended


# --- Otherwise ------------------------------------------------------------------------------------------------------

OTHERWISE_HERE: list[tuple[str, Callable[[httpx.Client], httpx.Response], int, str]] = [
    (
        "vLLM test_chat_logit_bias_multiple_non_integer_keys: all wrong keys are named",
        lambda http: http.post("/v1/chat/completions", json={**CHAT, "logit_bias": {"bad1": 50.0, "bad2": 20.0}}),
        400,
        "the first error ends the validation, so that no body is costly to refuse",
    ),
    (
        "llama.cpp test_correct_api_key_anthropic_header: X-Api-Key",
        lambda http: http.get("/v1/models", headers={"X-Api-Key": "right"}),
        200,
        "this server has no keys; one that has takes them as OpenAI's clients send them (test_middleware.py)",
    ),
    *(
        (
            f"llama.cpp {original}",
            lambda http, path=path, field=field, value=value: http.post(  # type: ignore[misc]
                path, json={**({"input": "a"} if "responses" in path else CHAT), field: value}
            ),
            400,
            reason,
        )
        for original, path, field, value, reason in (
            (
                "test_chat_completion_with_timings_per_token",
                CHATS,
                "timings_per_token",
                True,
                "metrics",
            ),
            ("test_return_progress", CHATS, "return_progress", True, "/metrics has it"),
            ("test_responses_stream_with_llama_telemetry", "/v1/responses", "return_progress", True, "/metrics has it"),
            ("test_completion_with_json_schema", CHATS, "json_schema", {}, "response_format says it"),
            ("test_completion_with_grammar", CHATS, "grammar", "root", "structured_outputs.grammar"),
            ("test_n_probs", CHATS, "n_probs", 10, "top_logprobs is OpenAI's name"),
            ("test_completion_response_fields", CHATS, "response_fields", [], "answers are OpenAI's"),
        )
    ),
    (
        "SGLang test_finish_stop_regex_str",
        lambda http: http.post("/v1/chat/completions", json={**CHAT, "stop_regex": "and|or"}),
        400,
        "a text ends at strings or tokens, or by a grammar",
    ),
    (
        "SGLang test_lora_model_name: model:adapter",
        lambda http: http.post("/v1/chat/completions", json={**CHAT, "model": "tiny:some_adapter"}),
        404,
        "there are no adapters",
    ),
    (
        "vLLM test_server_load: GET /load",
        lambda http: http.get("/load"),
        404,
        "/metrics has vllm:num_requests_running and vllm:num_requests_waiting",
    ),
    (
        "llama.cpp test_apply_chat_template: POST /apply-template",
        lambda http: http.post("/apply-template", json={"messages": USER}),
        404,
        "/tokenize with messages, then /detokenize",
    ),
]


@pytest.mark.parametrize(
    ("original", "ask", "status", "reason"), OTHERWISE_HERE, ids=[row[0][:60] for row in OTHERWISE_HERE]
)
def test_what_others_do_otherwise(
    http: httpx.Client, original: str, ask: Callable[[httpx.Client], httpx.Response], status: int, reason: str
) -> None:
    response = ask(http)
    assert response.status_code == status, (original, reason, response.text)
