"""Writer: token counts and acceptance."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.openai.completions import CompletionRequest, CompletionWriter
from deployments.openai.writer import Choice, Reply
from engine.requests.output import RoundTrace
from tests.deployments.fakes import LocalRouters, output
from tests.deployments.requests import complete


def writer(n: int, metrics: str = "detailed") -> CompletionWriter:
    request = CompletionRequest.model_validate({"prompt": "abc", "n": n, "speculative": {"metrics": metrics}})
    return CompletionWriter(Reply("a", "tiny", "", [[1, 2, 3]], None, 4), request)


def test_cached_tokens_are_those_that_the_first_router_had() -> None:
    choice = Choice(0, [1, 2, 3])
    for num_cached_tokens in (2, 0, 48):
        choice.append(output(5, num_cached_tokens=num_cached_tokens))
    assert choice.num_cached_tokens == 2


def test_a_prompt_is_counted_once_whatever_its_choices() -> None:
    two = writer(2)
    for choice in two.choices:
        choice.append(output(5, num_cached_tokens=2))
    counts = two.usage()
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (3, 2, 5)
    assert counts.prompt_tokens_details == {"cached_tokens": 2}


def test_rounds_without_a_draft_do_not_count_for_acceptance() -> None:
    one = writer(1)
    for drafted, accepted in ((4, 4), (0, 0), (4, 1), (6, 1)):
        one.choices[0].append(output(5, num_draft_tokens=drafted, num_accepted_tokens=accepted))
    metrics = one.usage_fields()["metrics"].speculative_decoding
    assert (metrics.num_spec_steps, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens) == (3, 14, 6)
    assert (metrics.mean_acceptance_length, metrics.draft_acceptance_rate) == (3.0, 6 / 14)
    assert (metrics.num_spec_tokens, metrics.acceptance_histogram) == (6, [0, 2, 0, 0, 1, 0, 0])  # a copy is longer
    assert metrics.acceptance_histogram_by_draft_length == {4: [0, 1, 0, 0, 1], 6: [0, 1, 0, 0, 0, 0, 0]}
    assert (metrics.per_step_drafted, metrics.per_step_accepted) == ([4, 4, 6], [4, 1, 1])
    assert writer(1, "summary").usage_fields()["metrics"].speculative_decoding.per_step_drafted is None
    assert writer(2).usage_fields()["metrics"].speculative_decoding is None
    assert "metrics" not in writer(1, "none").usage_fields()


async def test_a_prediction_is_tokenized_sent_and_counted(
    client: httpx.AsyncClient, routers: LocalRouters, tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = await complete(client, max_tokens=40)
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["text"]
    parts = {"type": "content", "content": [{"type": "text", "text": text[:30]}, {"type": "text", "text": "éé"}]}
    body = await complete(client, max_tokens=40, prediction=parts, n=2)
    assert routers.last.sequences()[1].predicted_token_ids == tokenizer.encode(text[:30] + "éé")
    assert [choice["text"] for choice in body["choices"]] == [text] * 2
    # The round that computes the prompt has no draft; after each copy, of 16 tokens at most, the target's own follows.
    details = body["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] in {2 * accepted for accepted in range(25, 29)}
    assert details["rejected_prediction_tokens"] == 2 * 4
    for chat in ("", text):
        request = {"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": chat}}
        response = await client.post("/v1/chat/completions", json={**request, "max_tokens": 4})
        assert response.json()["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] <= len(chat)


@pytest.mark.parametrize(
    ("token_ids", "path", "draft", "parents", "last"),
    [
        ([5, 6], [0], [5, 7], [-1, 0], "recovered"),
        ([5], [], [6], [-1], "recovered"),
        ([5, 7, 8], [0, 1], [5, 7], [-1, 0], "bonus"),
        ([5], [], [], [], "plain"),
        ([5], [0], [5, 7], [-1, 0], "accepted"),
        ([6, 9], [1], [5, 6, 7], [-1, -1, 0], "bonus"),
        ([5, 9], [0], [5, 6, 7], [-1, -1, 0], "recovered"),
        ([7, 8, 9], [1, 3], [7, 7, 5, 8], [-1, -1, 0, 1], "bonus"),  # chains may begin alike
    ],
)
def test_a_round_tells_what_its_last_token_is(
    token_ids: list[int], path: list[int], draft: list[int], parents: list[int], last: str
) -> None:
    request = CompletionRequest.model_validate({"prompt": "abc", "speculative": {"trace": True}})
    token_bytes: Any = SimpleNamespace(texts=lambda ids: list(map(str, ids)))
    one = CompletionWriter(Reply("a", "tiny", "", [[1]], token_bytes, 4), request)
    trace = RoundTrace(list(map(str, token_ids)), path, draft, parents)
    one.choices[0].append(output(*token_ids, trace=trace))
    (told,) = one.rounds_field(one.choices[0])["rounds"]
    assert (told.texts, told.draft) == (trace.texts, list(map(str, draft)))
    assert (told.accepted, told.last) == (len(path), last)
    assert one.rounds_field(one.choices[0]) == {"rounds": []}


async def test_rounds_are_sent_when_requested(client: httpx.AsyncClient) -> None:
    whole = (await complete(client, speculative={"trace": True}))["choices"][0]
    assert "".join(text for told in whole["rounds"] for text in told["texts"]) == whole["text"]
    assert {told["last"] for told in whole["rounds"]} == {"plain"}
    assert "rounds" not in (await complete(client))["choices"][0]
