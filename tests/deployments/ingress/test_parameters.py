"""sampling_params: every field reaches the engine, and a bad one is refused by name."""

import json
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig, Limits
from deployments.ingress.parameters import sampling_params
from deployments.ingress.prompts import PromptEncoder
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.router.generation import ModelLimits
from engine.errors import RequestError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import GREEDY, complete

CONTENT: Any = {
    "/v1/completions": {"prompt": "abcdef"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


async def test_every_field_reaches_the_engine(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": ["zz"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 1,
        "n": 1,
    }
    await complete(client, **fields, logit_bias={"5": 2.5}, cache_salt="s", speculative={"num_speculative_tokens": 3})
    assert routers.last is not None
    params = routers.last.params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.num_speculative_tokens, routers.last.cache_salt) == ({5: 2.5}, 3, "s")


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_the_log_probabilities_of_all_prompts_together_have_a_limit(
    config: AppConfig, routers: LocalRouters, path: str, field: str
) -> None:
    async with make_client(await make_app(config, routers)) as client:
        tokens = (await client.post("/tokenize", json=CONTENT[path])).json()["count"]
    limits = Limits(max_prompt_logprobs=2 * 3 * tokens)
    async with make_client(await make_app(config.model_copy(update={"limits": limits}), routers)) as client:
        for n, count, status in ((2, 2, 200), (3, 2, 400), (2, 3, 400), (8, None, 200)):
            body = {**CONTENT[path], "n": n, "max_tokens": 1, "prompt_logprobs": count}
            response = await client.post(path, json=body)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == field
                assert f"at most {6 * tokens} are allowed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("speculative", "length", "is_fixed"),
    [
        ({"num_speculative_tokens": 2, "fixed": True}, 2, True),
        ({"fixed": True}, 4, True),  # as many as the server allows
        ({"num_speculative_tokens": 0, "fixed": True}, 0, True),
        ({"num_speculative_tokens": 2, "fixed": False}, 2, False),
        ({"num_speculative_tokens": 2}, 2, False),
        ({}, None, False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_draft_length_is_a_limit_or_fixed(
    client: httpx.AsyncClient,
    routers: LocalRouters,
    path: str,
    speculative: dict[str, Any],
    length: int | None,
    is_fixed: bool,
) -> None:
    contents = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "abc", "max_output_tokens": 1},
    }
    response = await client.post(path, json={**contents[path], "speculative": speculative})
    assert response.status_code == 200, response.text
    assert routers.last is not None
    params = routers.last.params
    assert (params.num_speculative_tokens, params.fixes_draft_length) == (length, is_fixed)


def test_a_server_that_makes_no_drafts_says_so() -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "speculative": {"fixed": True}})
    with pytest.raises(RequestError, match="this server makes no drafts") as refused:
        sampling_params(request, ModelLimits(259, 512, num_speculative_tokens=0), Limits())
    assert refused.value.param == "speculative.fixed"


async def test_null_is_the_default_and_harmless_fields_are_accepted(client: httpx.AsyncClient) -> None:
    plain = await complete(client)
    body = await complete(client, stop=None, suffix=None, tools=None, user="me", metadata={"a": "b"}, n=None)
    assert body["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"\ud800": 1}, None),
        ({"stop": "\ud800"}, "stop"),
        ({"user": "\ud800"}, "user"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": []}, "tools"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 510}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"n": 9}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 65}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"speculative": {"num_speculative_tokens": 5}}, "speculative.num_speculative_tokens"),
        ({"speculative": {"enabled": False, "num_speculative_tokens": 2}}, "speculative.num_speculative_tokens"),
        ({"speculative": {"enabled": False, "fixed": True}}, "speculative.fixed"),
        ({"speculative": {"num_speculative_tokens": 5, "fixed": True}}, "speculative.num_speculative_tokens"),
        ({"speculative": {"fixed": 4}}, "speculative.fixed"),
    ],
)
async def test_a_bad_field_is_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str | None) -> None:
    content = json.dumps({"prompt": "abc", **GREEDY, **fields})
    response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param, error
    assert error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 9},
        {"max_tokens": 512},
        {"stop": "a" * 65},
        {"logprobs": 21},
        {"stop_token_ids": [999]},
        {"logit_bias": {"999": 1}},
        {"stream_options": {}},
        {"prompt": ["a", [999]]},
        {"speculative": {"num_speculative_tokens": 5}},
        {"structured_outputs": {}},
    ],
)
async def test_nothing_is_tokenized_for_a_request_that_no_prompt_could_make_right(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    for method in ("encode", "encode_chat"):
        monkeypatch.setattr(PromptEncoder, method, lambda *_, **__: pytest.fail("it was tokenized"))
    assert (await client.post("/v1/completions", json={"prompt": "abc", **fields})).status_code == 400
    if not fields.keys() & {"prompt", "logprobs"}:
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"echo": True}, "echo is true, but this model is an encoder-decoder"),
        ({"echo": True, "logprobs": 2}, "echo is true, but this model is an encoder-decoder"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is 0, but this model is an encoder-decoder"),
    ],
)
def test_an_encoder_decoder_predicts_nothing_of_its_prompt(fields: dict[str, Any], message: str) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", **fields})
    with pytest.raises(RequestError, match=message) as refused:
        sampling_params(request, ModelLimits(259, 512, 4, has_encoder=True), Limits())
    assert refused.value.param == next(iter(fields))
    sampling_params(request, ModelLimits(259, 512, 4), Limits())


def test_an_encoder_decoder_takes_prompts_and_no_conversations() -> None:
    limits = ModelLimits(259, 512, 4, has_encoder=True)
    sampling_params(CompletionRequest.model_validate({"prompt": "a", "echo": False}), limits, Limits())
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(RequestError, match="takes no conversations; use /v1/completions") as refused:
        sampling_params(chat, limits, Limits())
    assert refused.value.param == "messages"
