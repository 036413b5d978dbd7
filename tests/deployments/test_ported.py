"""What other servers' own test suites assert, against this one. The comment over each test names the originals.

Assertions that the original makes of its own model's words are left out. Those that do not hold here are in
`REFUSED_HERE`, with the reason.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.config import AppConfig
from tests.deployments.conftest import make_app, make_client, make_sdk
from tests.deployments.fakes import LocalRouters
from tests.deployments.templates import HERMES, save_tokenizer

CHAT: Any = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}],
    "temperature": 0,
    "max_completion_tokens": 8,
}
COMPLETION: Any = {"model": "tiny", "prompt": "Hello, my name is", "temperature": 0, "max_tokens": 5}
WEATHER: Any = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 8}},
        "required": ["location"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
VARIED: Any = {"temperature": 1, "seed": 3, "extra_body": {"repetition_penalty": 2.0}}


@pytest.fixture
async def caller(routers: LocalRouters, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a model that calls tools."""
    save_tokenizer(HERMES, tmp_path)
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield make_sdk(client)


# --- Completions ----------------------------------------------------------------------------------------------------


# vLLM completion/test_completion.py: test_single_completion, test_no_logprobs, test_zero_logprobs, test_some_logprobs
async def test_completions_and_their_log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    completion = await sdk.completions.create(**COMPLETION)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert not hasattr(completion.choices[0], "prompt_logprobs")
    ids = {**COMPLETION, "prompt": [0, 0, 0, 0, 0]}
    assert (await sdk.completions.create(**ids, logprobs=None)).choices[0].logprobs is None
    # The original says at least 5 of 5; here many bytes have one text, so that OpenAI's form cannot hold them all.
    for count, bounds in ((0, (1, 1)), (5, (2, 6))):
        logprobs = (await sdk.completions.create(**ids, logprobs=count)).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        assert bounds[0] <= len(logprobs.top_logprobs[0]) <= bounds[1]


# vLLM completion/test_completion.py: test_too_many_completion_logprobs (whole and streamed, and the server goes on)
async def test_too_many_log_probabilities_are_refused(sdk: openai.AsyncOpenAI) -> None:
    for count, stream in ((21, False), (30, True)):
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(**COMPLETION, logprobs=count, stream=stream)
    assert (await sdk.completions.create(**COMPLETION)).choices


# vLLM completion/test_completion.py: test_prompt_logprobs_completion; chat_completion/test_chat.py:
# test_prompt_logprobs_chat, test_more_than_one_prompt_logprobs_chat
async def test_prompts_have_log_probabilities_when_asked(sdk: openai.AsyncOpenAI) -> None:
    batch = {**COMPLETION, "prompt": ["A robot may not", "My name is"]}
    for count in (0, 1):
        completion: Any = await sdk.completions.create(**batch, extra_body={"prompt_logprobs": count})
        assert len(completion.choices[0].prompt_logprobs) == 15
        assert len(completion.choices[1].prompt_logprobs) == 10
    chats: list[Any] = [
        await sdk.chat.completions.create(**CHAT, extra_body={"prompt_logprobs": count}) for count in (1, 2)
    ]
    # The original says 1 and 2, because its model finds each token of its own prompt the likeliest.
    assert [1 <= len(chat.prompt_logprobs[3]) - count <= 2 for count, chat in enumerate(chats)] == [True, True]
    for create, options in ((sdk.completions.create, batch), (sdk.chat.completions.create, CHAT)):
        make: Any = create
        with pytest.raises(openai.BadRequestError):
            await make(**options, extra_body={"prompt_logprobs": -1})


# vLLM completion/test_completion.py: test_completion_truncation_side_controls_prompt_truncation
async def test_the_side_of_a_prompt_that_is_cut(sdk: openai.AsyncOpenAI) -> None:
    options = {**COMPLETION, "prompt": list(range(8)), "max_tokens": 1}
    for side, kept in (("right", [0, 1, 2, 3]), ("left", [4, 5, 6, 7])):
        fields = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        completion: Any = await sdk.completions.create(**options, extra_body=fields)
        assert completion.choices[0].prompt_token_ids == kept


# vLLM completion/test_completion.py: test_completion_stream_options
async def test_when_a_stream_of_completions_reports_usage(sdk: openai.AsyncOpenAI) -> None:
    for options, in_chunks, in_the_end in (
        ({"include_usage": False, "continuous_usage_stats": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({}, False, False),
    ):
        stream = await sdk.completions.create(**COMPLETION, stream=True, stream_options=options)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        assert [chunk.usage is not None for chunk in chunks if chunk.choices] == [in_chunks] * 5
        assert [chunk.usage is not None for chunk in chunks if not chunk.choices] == [True] * in_the_end
        for usage in (chunk.usage for chunk in chunks if chunk.usage):
            assert usage.prompt_tokens > 0
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for options in ({"include_usage": None}, {"continuous_usage_stats": None}, {"continuous_usage_stats": True}):
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(**COMPLETION, stream=False, stream_options=options)  # type: ignore[call-overload]


# vLLM completion/test_completion.py: test_parallel_no_streaming, test_parallel_streaming
async def test_several_texts_for_one_prompt(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {**COMPLETION, "n": 3, "max_tokens": 30, **VARIED}
    whole = await sdk.completions.create(**options, logprobs=0)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in whole.choices)
    texts, ends = ["", "", ""], Counter[int]()
    async for chunk in await sdk.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert ends == {0: 1, 1: 1, 2: 1}
    assert texts == [choice.text for choice in whole.choices]


# vLLM completion/test_completion.py: test_batch_completions
async def test_copies_of_a_prompt_have_the_same_text(sdk: openai.AsyncOpenAI) -> None:
    for prompts in (["Hello, my name is"] * 2, [[0, 0, 0, 0, 0]] * 2):
        batch = await sdk.completions.create(**{**COMPLETION, "prompt": prompts})
        assert len(batch.choices) == 2
        assert batch.choices[0].text == batch.choices[1].text
        texts = ["", ""]
        async for chunk in await sdk.completions.create(**{**COMPLETION, "prompt": prompts}, stream=True):
            assert len(chunk.choices) == 1
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts[0] == texts[1] == batch.choices[0].text


# vLLM completion/test_completion.py: test_echo_logprob_completion; SGLang basic/test_openai_server.py: run_completion
@pytest.mark.parametrize("count", [1, 0])
async def test_an_echoed_prompt_has_log_probabilities(sdk: openai.AsyncOpenAI, count: int) -> None:
    for prompt in ("Hello, my name is", [72, 72, 72, 72, 72]):
        completion = await sdk.completions.create(**{**COMPLETION, "prompt": prompt}, echo=True, logprobs=count)
        assert completion.choices[0].text.startswith(prompt if isinstance(prompt, str) else "iiiii")
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None  # type: ignore[unreachable]
        assert logprobs.top_logprobs is not None  # type: ignore[unreachable]
        assert logprobs.top_logprobs[0] is None
        assert all(max(count, 1) <= len(top) <= count + 1 for top in logprobs.top_logprobs[1:])
        assert len(logprobs.tokens) == len(logprobs.text_offset) == (22 if isinstance(prompt, str) else 10)


# vLLM completion/test_completion.py: test_invalid_json_schema, test_invalid_regex, test_invalid_grammar;
# completion/test_prompt_validation.py: test_out_of_vocab_token_ids, test_empty_prompt
async def test_invalid_completions_are_refused(sdk: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}, "required": ["brand"]}
    grammar = 'root ::= select_statementinvalidsyntax\nselect_statement ::= "SELECT "\n'
    for source in ({"json": schema}, {"regex": r"[.*"}, {"grammar": grammar}):
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(**COMPLETION, extra_body={"structured_outputs": source})
    for prompt in ([999999], None):
        with pytest.raises(openai.BadRequestError):
            await sdk.completions.create(**{**COMPLETION, "prompt": prompt})


# vLLM basic/test_return_token_ids.py: test_basic_completion_with_emoji, test_chat_completion_with_emoji_and_token_ids
async def test_token_ids_come_when_asked(sdk: openai.AsyncOpenAI, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = "I love coding 🚀"
    options = {**COMPLETION, "prompt": prompt, "logprobs": 1}
    completion: Any = await sdk.completions.create(**options, extra_body={"return_token_ids": True})
    assert completion.choices[0].prompt_token_ids == tokenizer.encode(prompt)
    assert tokenizer.decode(completion.choices[0].token_ids) == completion.choices[0].text
    without = (await sdk.completions.create(**options, extra_body={"return_token_ids": False})).model_dump()
    assert "token_ids" not in without["choices"][0]
    stream = await sdk.chat.completions.create(**CHAT, stream=True, extra_body={"return_token_ids": True})
    chunks: list[Any] = [chunk async for chunk in stream]
    assert "best book" in tokenizer.decode(chunks[0].prompt_token_ids)
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert tokenizer.decode(ids) == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


# llama.cpp test_completion.py: test_completion_with_tokens_input, test_consistent_result_same_seed,
# test_different_result_different_seed, test_nocache_long_input_prompt
async def test_tokens_seeds_and_long_prompts(client: httpx.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": COMPLETION["prompt"]})).json()["tokens"]
    text = (await sdk.completions.create(**COMPLETION)).choices[0].text
    assert (await sdk.completions.create(**{**COMPLETION, "prompt": tokens})).choices[0].text == text
    sampled = {**COMPLETION, "temperature": 100, "max_tokens": 20}
    texts = [(await sdk.completions.create(**sampled, seed=seed)).choices[0].text for seed in (0, 1, 2, 3, 3)]
    assert len(set(texts)) == 4
    with pytest.raises(openai.BadRequestError):
        await sdk.completions.create(**{**COMPLETION, "prompt": COMPLETION["prompt"] * 64})


# --- Chat -----------------------------------------------------------------------------------------------------------


# llama.cpp test_chat_completion.py: test_chat_completion_with_openai_library, test_chat_completion_stream,
# test_logprobs
async def test_chat_completions_and_their_log_probabilities(sdk: openai.AsyncOpenAI) -> None:
    chat = await sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=10)
    assert chat.system_fingerprint is not None
    assert "cmpl" in chat.id
    assert chat.choices[0].finish_reason == "length"
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == chat.choices[0].message.content
    assert all(token.logprob <= 0 and token.bytes is not None for token in logprobs.content)
    assert all(len(token.top_logprobs) == 10 for token in logprobs.content)
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**CHAT, stream=True)]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {chat.system_fingerprint}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


# vLLM chat_completion/test_chat.py: test_zero_logprobs_chat, test_too_many_chat_logprobs
async def test_no_and_too_many_alternatives(sdk: openai.AsyncOpenAI) -> None:
    logprobs = (await sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=0)).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs == []
    for count, stream in ((21, True), (30, False)):
        with pytest.raises(openai.BadRequestError):
            await sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=count, stream=stream)


# vLLM chat_completion/test_chat.py: test_chat_completion_stream_options
async def test_token_counts_grow_with_a_stream(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await sdk.chat.completions.create(
        **CHAT, stream=True, stream_options=options, extra_body={"min_tokens": 8}
    )
    usages = [chunk.usage async for chunk in stream]
    assert all(usage is not None for usage in usages)
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    with pytest.raises(openai.BadRequestError):
        await sdk.chat.completions.create(**CHAT, stream_options={"include_usage": True})


# vLLM chat_completion/test_chat.py: test_chat_completion_n_parameter_non_streaming, ..._streaming, ..._n_with_seed,
# test_long_seed, test_response_format_text, test_complex_message_content
async def test_choices_seeds_and_parts(sdk: openai.AsyncOpenAI) -> None:
    several = await sdk.chat.completions.create(**{**CHAT, "temperature": 100, "seed": 42}, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    streamed = Counter[int]()
    async for chunk in await sdk.chat.completions.create(**CHAT, n=2, stream=True):
        streamed.update(choice.index for choice in chunk.choices if choice.delta.content)
    assert set(streamed) == {0, 1}
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(openai.BadRequestError):
            await sdk.chat.completions.create(**CHAT, seed=seed)
    plain = await sdk.chat.completions.create(**CHAT)
    assert (await sdk.chat.completions.create(**CHAT, response_format={"type": "text"})).choices == plain.choices
    parts: Any = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in CHAT["messages"]]
    assert (await sdk.chat.completions.create(**{**CHAT, "messages": parts})).choices == plain.choices


# llama.cpp test_chat_completion.py: test_invalid_chat_completion_req, test_completion_with_response_format
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "string"},
        {"messages": [123]},
        {"messages": [{}]},
        {"messages": [{"role": 123}]},
        {"messages": [{"role": "system", "content": 123}]},
        {"messages": [{"content": "hello"}]},
        {"messages": [{"role": "system", "content": "test"}, {}]},
        {"response_format": {"type": "sound"}},
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "hiccup"}}}},
    ],
)
async def test_invalid_conversations_are_refused(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400
    assert "error" in response.json()


# --- Tools ----------------------------------------------------------------------------------------------------------


# SGLang function_call/test_tool_choice.py: test_tool_choice_auto_*, test_tool_choice_required_*,
# test_tool_choice_specific_function_*
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_choice_of_tools(caller: openai.AsyncOpenAI, choice: Any, stream: bool) -> None:
    options: Any = {**CHAT, "max_completion_tokens": 120, "tools": TOOLS, "tool_choice": choice, **VARIED}
    if not stream:
        message = (await caller.chat.completions.create(**options)).choices[0].message
        names = [call.function.name for call in message.tool_calls or [] if call.type == "function"]
    else:
        names = []
        async for chunk in await caller.chat.completions.create(**options, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
    assert set(names) == (set() if choice == "auto" else {"get_weather"})


# vLLM chat_completion/test_completion_with_function_calling.py: test_inconsistent_tool_choice_and_tools
async def test_a_choice_that_does_not_fit_the_tools_is_refused(caller: openai.AsyncOpenAI) -> None:
    for fields in (
        {"tool_choice": NAMED},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nondefined_function_name"}}},
        {"tools": TOOLS, "tool_choice": {}},
    ):
        with pytest.raises(openai.BadRequestError):
            await caller.chat.completions.create(**CHAT, **fields)


# vLLM chat_completion/test_completion_with_function_calling.py: test_no_args_tool_call
@pytest.mark.parametrize("arguments", ["{}", ""])
async def test_a_call_without_arguments_goes_back(caller: openai.AsyncOpenAI, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_current_time", "arguments": arguments}}
    messages: Any = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    chat = await caller.chat.completions.create(**{**CHAT, "messages": messages})
    assert chat.choices[0].message.content


# vLLM chat_completion/test_completion_with_function_calling.py: test_max_tokens_with_tool_choice_required, in part
async def test_a_required_call_without_room_ends_for_its_length(caller: openai.AsyncOpenAI) -> None:
    for choice in ("required", NAMED):
        options: Any = {**CHAT, "max_completion_tokens": 1, "tools": TOOLS, "tool_choice": choice}
        cut = (await caller.chat.completions.create(**options)).choices[0]
        assert cut.finish_reason == "length"
        assert not cut.message.tool_calls


# --- Responses ------------------------------------------------------------------------------------------------------


# llama.cpp test_compat_oai_responses.py: test_responses_with_openai_library, test_responses_stream_with_openai_library
async def test_responses_have_ids_that_hold_through_a_stream(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "tiny", "input": CHAT["messages"], "max_output_tokens": 8, "temperature": 0}
    whole = await sdk.responses.create(**options)
    assert whole.id.startswith("resp_")
    assert (whole.output[0].id or "").startswith("msg_")
    events: list[Any] = [event async for event in await sdk.responses.create(**options, stream=True)]
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert len({event.item.id for event in events if hasattr(event, "item")}) == 1
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text


# llama.cpp test_compat_oai_responses.py: test_responses_with_text_format
async def test_responses_have_forms(client: httpx.AsyncClient) -> None:
    for form, status in (
        ({"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}, 200),
        ({"type": "text"}, 200),
        ({"type": "json_schema", "name": "test"}, 400),
    ):
        body = {"input": "Write an example", "max_output_tokens": 20, "text": {"format": form}}
        response = await client.post("/v1/responses", json=body)
        assert response.status_code == status
        if form.get("schema"):
            assert json.loads(response.json()["output"][0]["content"][0]["text"]) == "foooooo"


# SGLang function_call/test_responses_function_calling.py: test_function_tool_schema_validation, test_tool_choice_none,
# test_multiple_function_tools, test_function_tool_with_strict_mode, test_function_tool_streaming
async def test_responses_take_tools(caller: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER}
    options: Any = {
        "model": "tiny",
        "input": "What's the weather in Paris?",
        "max_output_tokens": 30,
        "temperature": 1,
    }
    options["extra_body"] = {"seed": 3, "repetition_penalty": 2.0}
    for tools in ([tool], [tool, {"type": "function", "name": "get_time"}], [{**tool, "strict": True}]):
        response = await caller.responses.create(**options, tools=tools)
        assert response.id
        assert response.output
    assert not any(item.type == "function_call" for item in response.output)
    none = await caller.responses.create(**options, tools=[tool], tool_choice="none")
    assert [item.type for item in none.output] == ["message"]
    events = [event async for event in await caller.responses.create(**options, tools=[tool], stream=True)]
    assert events[0].type == "response.created"


# --- Others ---------------------------------------------------------------------------------------------------------


# llama.cpp test_tokenize.py: test_tokenize_detokenize, test_tokenize_with_pieces
async def test_text_becomes_tokens_and_comes_back(client: httpx.AsyncClient) -> None:
    text = "This is a test string with unicode 媽 and emoji 🤗"
    tokens = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert all(tokens["token_strs"])
    assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"] == text


# llama.cpp test_security.py: test_access_public_endpoint (health), test_incorrect_api_key, test_correct_api_key
async def test_keys_open_what_is_not_public(config: AppConfig, routers: LocalRouters) -> None:
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        assert (await client.get("/health")).status_code == 200
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer right"}, 200),
        ):
            response = await client.post("/v1/completions", json=COMPLETION, headers=headers)
            assert response.status_code == status
            assert (status == 200) or response.json()["error"]["type"] == "authentication_error"


REFUSED_HERE: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "vLLM chat_completion/test_chat.py: test_extra_fields_allowed",
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]},
        "an unknown field is refused by name, so that a misspelt one is noticed",
    ),
    (
        "vLLM chat_completion/test_chat.py: test_custom_role",
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "my-custom-role", "content": "what is 1+1?"}]},
        "a role is one of OpenAI's",
    ),
    (
        "vLLM completion/test_completion.py: test_batch_completions (use_beam_search)",
        "/v1/completions",
        {**COMPLETION, "use_beam_search": True},
        "there is no beam search",
    ),
    (
        "vLLM basic/test_return_token_ids.py: test_comparison_with_prompt_logprobs_and_logprobs",
        "/v1/completions",
        {**COMPLETION, "logprobs": 1, "return_tokens_as_token_ids": True},
        "token ids have a field of their own, return_token_ids",
    ),
    (
        "llama.cpp test_completion.py: test_completion_with_tokens_input (mixed)",
        "/v1/completions",
        {**COMPLETION, "prompt": [[1, 2, 3], "text"]},
        "OpenAI's prompts are text or tokens, not both",
    ),
    (
        "llama.cpp test_chat_completion.py: test_completion_with_response_format (schema of json_object, no name)",
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object", "schema": {"const": "42"}}},
        "OpenAI writes a schema as json_schema",
    ),
    (
        "SGLang basic/test_openai_server.py: test_regex",
        "/v1/chat/completions",
        {**CHAT, "regex": "a+"},
        "structured_outputs.regex, vLLM's name, says the same",
    ),
]


@pytest.mark.parametrize(("original", "path", "body", "reason"), REFUSED_HERE, ids=lambda value: str(value)[:60])
async def test_what_others_accept_is_refused_by_name(
    client: httpx.AsyncClient, original: str, path: str, body: dict[str, Any], reason: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, (original, reason)
    assert response.json()["error"]["param"]
