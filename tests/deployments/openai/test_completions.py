"""/v1/completions through HTTP: one text whole or in pieces."""

import httpx
import pytest

from tests.deployments.requests import complete, events


async def test_a_completion_has_openais_shape(client: httpx.AsyncClient) -> None:
    body = await complete(client)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    choice = body["choices"][0]
    assert len(choice["text"]) == 8
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 8, 11)
    assert "metrics" not in body


async def test_usage_comes_last_without_choices_or_with_every_chunk(client: httpx.AsyncClient) -> None:
    options: dict[str, object] = {"include_usage": True, "continuous_usage_stats": None}
    *chunks, last = await events(client, "/v1/completions", prompt="abc", stream_options=options)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"continuous_usage_stats": True}
    *chunks, last = await events(client, "/v1/completions", prompt="abc", stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 9))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    options["include_usage"] = False
    chunks = await events(client, "/v1/completions", prompt="abc", stream_options=options)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "num_choices"), [("ab", 2), (["ab", "cd"], 4), ([64, 65], 2), ([[64, 65], [66]], 4)]
)
async def test_prompts_in_every_form(client: httpx.AsyncClient, prompt: object, num_choices: int) -> None:
    body = await complete(client, prompt=prompt, n=2, seed=1, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
    assert all(len(choice["token_ids"]) == 8 for choice in body["choices"])
    assert body["choices"][0]["prompt_token_ids"] == [64, 65]


async def test_every_choice_of_every_prompt_has_its_own_echo(client: httpx.AsyncClient) -> None:
    for prompts in (["abc", "de", "a</s>b"], [[64, 65], [256, 66]]):
        body = await complete(client, prompt=prompts, n=2, echo=True, max_tokens=1)
        texts = [choice["text"][:-1] for choice in body["choices"]]
        assert texts == (["abc"] * 2 + ["de"] * 2 + ["a</s>b"] * 2 if len(prompts) == 3 else ["ab"] * 2 + ["c"] * 2)


async def test_a_stop_string_ends_the_text(client: httpx.AsyncClient) -> None:
    text = (await complete(client))["choices"][0]["text"]
    choice = (await complete(client, stop=text[2:5]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:2], "stop", text[2:5])
    chunks = await events(client, "/v1/completions", prompt="abc", stop=[text[2:5]])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:2]
