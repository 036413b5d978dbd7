"""The contract of every endpoint, through HTTP to an engine in this process."""

import json
from typing import Any

import httpx
import openai
import pytest

from deployments.config import AppConfig, Limits
from deployments.errors import KINDS
from engine.errors import DrafterError, QueueFullError, TargetError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The JSON of a stream's events; it must end in [DONE]."""
    response = await client.post(path, json={"stream": True, **GREEDY, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"prompt": "abc", **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_completion_has_openais_shape(client: httpx.AsyncClient) -> None:
    body = await complete(client)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    choice = body["choices"][0]
    assert len(choice["text"]) == 8
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 8, 11)
    assert "metrics" not in body


async def test_a_stream_says_the_same_once_per_round(client: httpx.AsyncClient) -> None:
    whole = await complete(client)
    chunks = await events(client, "/v1/completions", prompt="abc")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert len(chunks) == 8
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 7 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_and_without_choices(client: httpx.AsyncClient) -> None:
    *chunks, last = await events(
        client, "/v1/completions", prompt="abc", stream_options={"include_usage": True, "continuous_usage_stats": None}
    )
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_usage_comes_with_every_chunk_when_asked(client: httpx.AsyncClient) -> None:
    chunks = await events(client, "/v1/completions", prompt="abc", stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 9))


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [("ab", 2), (["ab", "cd"], 4), ([64, 65], 2), ([[64, 65], [66]], 4)]
)
async def test_prompts_in_every_form(client: httpx.AsyncClient, prompt: object, num_choices: int) -> None:
    body = await complete(client, prompt=prompt, n=2, seed=1, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
    assert all(len(choice["token_ids"]) == 8 for choice in body["choices"])
    assert body["choices"][0]["prompt_token_ids"] == [64, 65]


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient) -> None:
    plain = await complete(client)
    echoed = await complete(client, echo=True)
    assert echoed["choices"][0]["text"] == "abc" + plain["choices"][0]["text"]
    chunks = await events(client, "/v1/completions", prompt="abc", echo=True)
    assert chunks[0]["choices"][0]["text"] == "abc"


async def test_logprobs_name_every_token(client: httpx.AsyncClient) -> None:
    logprobs = (await complete(client, logprobs=2))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 8
    assert logprobs["text_offset"] == list(range(8))
    chunks = await events(client, "/v1/completions", prompt="abc", logprobs=2)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[i] for i in range(8)]


async def test_a_stop_string_ends_the_text(client: httpx.AsyncClient) -> None:
    text = (await complete(client))["choices"][0]["text"]
    choice = (await complete(client, stop=text[2:5]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:2], "stop", text[2:5])
    chunks = await events(client, "/v1/completions", prompt="abc", stop=[text[2:5]])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:2]


async def test_a_conversation_is_answered(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    response = await client.post("/v1/chat/completions", json={"messages": messages, **GREEDY, "logprobs": True})
    body = response.json()
    choice = body["choices"][0]
    assert (body["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert len(choice["logprobs"]["content"]) == 8
    first, *chunks = await events(client, "/v1/chat/completions", messages=messages)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == choice["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 7 + ["length"]


async def test_a_conversation_takes_all_the_room_unless_told(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    response = await client.post("/v1/chat/completions", json={**body, "stop": "a"})
    assert response.status_code == 200
    assert routers.last is not None
    assert routers.last.params.max_tokens == 512 - len(routers.last.prompts[0])


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


async def test_null_is_the_default_and_harmless_fields_are_accepted(client: httpx.AsyncClient) -> None:
    plain = await complete(client)
    body = await complete(client, stop=None, suffix=None, tools=None, user="me", metadata={"a": "b"}, n=None)
    assert body["choices"] == plain["choices"]


async def test_acceptance_figures_are_there_when_asked_for(client: httpx.AsyncClient) -> None:
    body = await complete(client, speculative={"metrics": "detailed"})
    figures = body["metrics"]["speculative_decoding"]
    assert figures["acceptance_histogram"] == [0] * 5
    assert figures["per_step_accepted"] == []
    body = await complete(client, speculative={"metrics": "summary"}, n=2)
    assert body["metrics"] == {"speculative_decoding": None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
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
        ({"stop": ""}, "stop"),
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
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
async def test_a_bad_conversation_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = await client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param or (param is None and error["param"].startswith("messages.0.content.0")), error


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
async def test_a_body_that_is_no_request_is_400(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
async def test_wrong_routes_have_the_same_shape(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"]


async def test_another_model_is_404(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("error", [TargetError("gone"), QueueFullError("full"), DrafterError("bug"), ValueError("bug")])
async def test_an_error_after_the_first_byte_is_an_event(
    client: httpx.AsyncClient, routers: LocalRouters, error: Exception
) -> None:
    routers.error = error
    *_, last = await events(client, "/v1/completions", prompt="abc")
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "bug" not in last["error"]["message"]


@pytest.mark.parametrize("error", [TargetError("gone"), QueueFullError("full"), ValueError("bug")])
async def test_an_error_before_the_first_byte_is_a_status(
    client: httpx.AsyncClient, routers: LocalRouters, error: Exception
) -> None:
    routers.error = error
    response = await client.post("/v1/completions", json={"prompt": "abc", **GREEDY})
    assert response.status_code == (KINDS[type(error)].status if type(error) in KINDS else 500)
    assert "bug" not in response.text
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))


async def test_a_full_queue_is_429_before_a_stream_starts(config: AppConfig) -> None:
    rig = Rig(max_queued_requests=1)
    async with make_client(await make_app(config, LocalRouters(rig))) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"] == "1"
    await rig.loop.stop()


async def test_a_request_over_its_deadline_is_408(config: AppConfig, routers: LocalRouters, rig: Rig) -> None:
    limits = Limits(request_timeout_s=0.01)
    rig.verifier.gate.clear()
    app = await make_app(config.model_copy(update={"limits": limits}), routers)
    async with make_client(app) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-seconds": "0"}
        )
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    rig.verifier.gate.set()


async def test_text_becomes_tokens_and_back(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "a</s>", "return_token_strs": True})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (5, 512)
    assert "".join(tokens["token_strs"]) == "a</s>"
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "a</s>"}


async def test_what_is_served(client: httpx.AsyncClient, config: AppConfig) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", config.pair.target.path, 512)
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/version")).json()["version"]


async def test_health_is_503_without_progress(client: httpx.AsyncClient, rig: Rig) -> None:
    await rig.loop.stop()
    assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
async def test_everything_is_503_until_the_models_are_loaded(
    config: AppConfig, routers: LocalRouters, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("deployments.ingress.ingress.START_GRACE_S", 0.0)
    routers.has_loaded.clear()
    async with make_client(await make_app(config, routers)) as client:
        response = await client.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        routers.has_loaded.set()
        monkeypatch.setattr("deployments.ingress.ingress.START_GRACE_S", 1.0)
        assert (await client.get(path)).status_code == 200


async def test_metrics_show_the_rounds(client: httpx.AsyncClient) -> None:
    await complete(client)
    text = (await client.get("/metrics")).text
    for line in (
        'vllm:generation_tokens_total{model_name="tiny"} 8.0',
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'vllm:spec_decode_num_drafts_total{model_name="tiny"} 0.0',
    ):
        assert line in text


async def test_the_description_tells_the_truth(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert all("422" not in op["responses"] for path in schema["paths"].values() for op in path.values())


async def test_the_openai_client_works_unchanged(config: AppConfig, routers: LocalRouters) -> None:
    transport = httpx.ASGITransport(await make_app(config, routers))
    async with openai.AsyncOpenAI(
        base_url="http://paceline/v1", api_key="x", http_client=httpx.AsyncClient(transport=transport)
    ) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="tiny", prompt="a", temperature=-1)
