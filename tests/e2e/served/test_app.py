"""The whole path with real processes: the text of the engine, through HTTP, Serve, Ray actors and sockets."""

import asyncio
import re
import time

import anthropic
import httpx
import openai
import pytest

from engine.params import SamplingParams
from engine.sampling.grammar_text import from_regex

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROMPT = "A draft is a guess. "


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(target):

    def text(**params):
        return target.generate([PROMPT], SamplingParams(**params), show_progress=False)[0].outputs[0].text

    return text


def gauge(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_targets_own(client, expected, temperature):
    reference = expected(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    request = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": temperature,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    assert client.completions.create(**request).choices[0].text == reference
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == reference
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    plain = client.completions.create(
        **{**request, "extra_body": {"ignore_eos": True, "speculative": {"enabled": False}}}
    )
    assert plain.choices[0].text == reference


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_grammar_holds_on_every_process_of_the_way(client, url, expected, temperature):
    """The checker, draft and target each compile it; the drafts that the target keeps follow it too."""
    regex = r"[b-e]{4,40}(-[0-9]{2}){3}"
    kept = gauge(url, "spec_decode_num_accepted_tokens_total")
    reference = expected(temperature=temperature, seed=5, max_tokens=80, grammar=from_regex(regex))
    response = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=80,
        temperature=temperature,
        seed=5,
        extra_body={
            "structured_outputs": {"regex": regex},
            "speculative": {"num_speculative_tokens": 4, "fixed": True},
        },
    )
    assert response.choices[0].text == reference
    assert re.fullmatch(regex, reference)
    assert gauge(url, "spec_decode_num_accepted_tokens_total") > kept


def test_a_conversation_streams_role_text_and_usage(client):
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "seed": 1}
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens <= 10
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == client.chat.completions.create(**request).choices[0].message.content


def test_a_message_is_the_chat_completion_of_the_conversation(client, url):
    conversation = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=conversation, max_tokens=10, seed=1)
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    options = {"model": "tiny", "messages": conversation, "max_tokens": 10, "extra_body": {"seed": 1}}
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == chat.choices[0].message.content


def test_the_async_client_gets_several_choices(url):
    async def ask():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return await client.completions.create(model="tiny", prompt=[PROMPT, "Else"], n=2, max_tokens=4, logprobs=2)

    response = asyncio.run(ask())
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) for choice in response.choices)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [({"prompt": "a", "top_p": 0}, 400, "top_p"), ({"prompt": "a", "model": "other"}, 404, "model")],
)
def test_bad_input_is_refused_by_name(url, body, status, param):
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["message"]


def test_a_body_over_the_limit_is_refused_chunked_or_not(url):
    def pieces():
        for _ in range(6):
            yield b"x" * 2**20

    for content in (b"x" * (5 * 2**20), pieces()):
        assert httpx.post(f"{url}/v1/completions", content=content, timeout=60).status_code == 413


@pytest.mark.parametrize("headers", [{}, {"x-request-disconnect-disabled": "?1"}], ids=["open", "hiding"])
def test_a_client_that_leaves_frees_its_blocks(client, url, headers):
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}, extra_headers=headers
    )
    next(iter(stream))
    assert gauge(url, "num_requests_running") == 1
    stream.close()
    deadline = time.monotonic() + 180
    while gauge(url, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gauge(url, "num_requests_running") == 0
    assert gauge(url, "kv_cache_usage_perc") == 0


def test_salts_share_no_cached_tokens(client):
    def usage(salt):
        extra = {"cache_salt": salt}
        return client.completions.create(model="tiny", prompt=PROMPT * 8, max_tokens=1, extra_body=extra).usage

    answers = [usage(salt) for salt in ("a", "b", "a", "c", "b")]
    in_full_blocks = (answers[0].prompt_tokens - 1) // 16 * 16
    cached = [answer.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached == [0, 0, in_full_blocks, 0, in_full_blocks]
    assert in_full_blocks > 0
