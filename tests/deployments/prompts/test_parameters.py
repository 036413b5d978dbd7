"""sampling_params: every field reaches the engine, and a bad one is refused by name."""

from typing import Any

import httpx
import pytest

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.prompts import parameters
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.parameters import sampling_params
from deployments.wire import ModelLimits
from engine.encoder_decoder.model_kind import REFUSED
from engine.errors import RequestError
from tests.deployments.fakes import LocalRouters
from tests.deployments.requests import complete

CONTENT: Any = {
    "/v1/completions": {"prompt": "abcdef"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "abc", "max_output_tokens": 1},
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
        "stop_token_ids": [258],  # the last one
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 1,
        "n": 1,
    }
    await complete(client, **fields, logit_bias={"258": 2.5}, cache_salt="s", speculative={"num_speculative_tokens": 3})
    params = routers.last.params
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.num_speculative_tokens, routers.last.cache_salt) == ({258: 2.5}, 3, "s")


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_the_log_probabilities_of_all_prompts_together_have_a_limit(
    client: httpx.AsyncClient, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = (await client.post("/tokenize", json=CONTENT[path])).json()["count"]
    monkeypatch.setattr(parameters, "MAX_PROMPT_LOGPROBS", 2 * 3 * tokens)
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
        ({"num_speculative_tokens": 2}, 2, False),
        ({}, None, False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_draft_length_is_a_limit_or_fixed(
    client: httpx.AsyncClient,
    routers: LocalRouters,
    path: str,
    speculative: dict[str, Any],
    length: int | None,
    is_fixed: bool,
) -> None:
    response = await client.post(path, json={**CONTENT[path], "speculative": speculative})
    assert response.status_code == 200, response.text
    params = routers.last.params
    assert (params.num_speculative_tokens, params.fixes_draft_length) == (length, is_fixed)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 512},
        {"logprobs": 21},
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


LIMITS, NO_DRAFTS = (ModelLimits(259, 512, num_speculative_tokens=k) for k in (4, 0))
ENCODER = ModelLimits(259, 512, 4, refused=REFUSED)
PROMPT, CHAT = CONTENT["/v1/completions"], CONTENT["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("model", "fields", "param", "message"),
    [
        (ENCODER, {**PROMPT, "echo": True}, "echo", "does not continue the prompt"),
        (ENCODER, {**PROMPT, "prompt_logprobs": 0}, "prompt_logprobs", "predicts none of it"),
        (ENCODER, CHAT, "messages", "takes no conversations; use /v1/completions"),
        (ENCODER, {**PROMPT, "echo": False}, None, ""),
        (NO_DRAFTS, {**PROMPT, "speculative": {"fixed": True}}, "speculative.fixed", "this server makes no drafts"),
    ],
)
def test_what_a_model_cannot_do_is_refused(model: ModelLimits, fields: Any, param: str | None, message: str) -> None:
    request = (ChatCompletionRequest if "messages" in fields else CompletionRequest).model_validate(fields)
    sampling_params(request, LIMITS, max_n=8)
    if param is None:
        sampling_params(request, model, max_n=8)
        return
    with pytest.raises(RequestError, match=message) as refused:
        sampling_params(request, model, max_n=8)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "group"),
    [
        ({}, ""),
        ({"speculative": {"learn": True}}, ""),
        ({"speculative": {"learn": False}}, None),
        ({"cache_salt": "s"}, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_draft_learns_from_a_text_unless_the_client_salts_it_or_opts_out(
    client: httpx.AsyncClient, routers: LocalRouters, path: str, fields: dict[str, Any], group: str | None
) -> None:
    response = await client.post(path, json={**CONTENT[path], **fields})
    assert response.status_code == 200, response.text
    assert routers.last.params.learning_group == group
