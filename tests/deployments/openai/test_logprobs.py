"""A prompt that comes back with its log probabilities: the exact ones, whole, in a stream, for every choice."""

import itertools
import json
import math
from typing import Any

import httpx
import pytest

from tests.deployments.conftest import make_sdk
from tests.deployments.fakes import Rig

PROMPT = "abc"


def law(rig: Rig) -> Any:
    return rig.engine.verifier._verifier.backend.transitions  # type: ignore[attr-defined]


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("!") for letter in text]


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    sent = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 2, **body}
    response = await client.post("/v1/completions", json=sent)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_first_token_has_none_the_others_have_the_targets(client: httpx.AsyncClient, rig: Rig) -> None:
    choice = (await complete(client))["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert logprobs["tokens"] == list(text)
    assert text.startswith(PROMPT)
    assert len(text) == 7
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    tokens = ids(text)
    expected = [math.log(law(rig)[before, token]) for before, token in itertools.pairwise(tokens)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
    assert all(logprobs["top_logprobs"][i][text[i]] == logprobs["token_logprobs"][i] for i in range(1, 7))


async def test_a_stream_says_the_same(client: httpx.AsyncClient) -> None:
    whole = (await complete(client, n=2))["choices"]
    sent = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 2, "n": 2, "stream": True}
    response = await client.post("/v1/completions", json=sent)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    for choice in whole:
        pieces = [json.loads(line)["choices"][0] for line in lines]
        pieces = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


async def test_a_prompt_seen_before_loses_none(client: httpx.AsyncClient) -> None:
    prompt = [token % 90 for token in range(100)]
    plain = await complete(client, prompt=prompt, echo=False)
    again = await complete(client, prompt=prompt, echo=False)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    echoed = await complete(client, prompt=prompt)
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == 104
    assert logprobs[100:] == plain["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_prompt_is_scored_without_a_token(client: httpx.AsyncClient, n: int) -> None:
    expected = (await complete(client))["choices"][0]["logprobs"]
    scored = await complete(client, max_tokens=0, n=n, return_token_ids=True)
    for choice in scored["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        assert choice["logprobs"] == {name: values[:3] for name, values in expected.items()}
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["total_tokens"] == scored["usage"]["prompt_tokens"] == 3
    assert len((await complete(client, max_tokens=0, prompt=[5]))["choices"][0]["logprobs"]["tokens"]) == 1
    plain = await complete(client, max_tokens=0, logprobs=None)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (PROMPT, None)


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_stream_scores_a_prompt_too(client: httpx.AsyncClient, logprobs: int | None) -> None:
    whole = await complete(client, max_tokens=0, logprobs=logprobs)
    sdk = make_sdk(client)
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": logprobs}
    stream = await sdk.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *pieces, last = [chunk async for chunk in stream]
    assert "".join(piece.choices[0].text for piece in pieces) == PROMPT
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason] == ["length"]
    assert last.usage is not None
    assert last.usage.completion_tokens == 0
    logprobs = pieces[-1].choices[0].logprobs
    assert (logprobs and logprobs.model_dump()) == whole["choices"][0]["logprobs"]
