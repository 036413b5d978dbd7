"""The whole path with real processes: HTTP, Serve, Ray actors, sockets, and a SIGKILL."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig
from deployments.environment import serve_environment
from engine.llm import LLM
from engine.sampling.grammar import from_regex
from engine.sampling.params import SamplingParams
from tests.e2e.models import save_model
from tests.e2e.servers import serve_on_ray

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROMPT = "A draft is a guess. "


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("target"), seed=1, layers=2, hidden=32)
    return target, save_model(tmp_path_factory.mktemp("draft"), seed=2, layers=1, hidden=16)


@pytest.fixture(scope="module")
def url(pair):
    with serve_on_ray(2, serve_environment(AppConfig())) as url:
        serve.run(app(config_of(pair)))
        yield url


def config_of(pair, **changes):
    settings = {
        "target_model": pair[0],
        "draft_model": pair[1],
        "served_model_name": "tiny",
        "dtype": "float32",
        "compile": "off",
        "speculation": "fixed",
    }
    return AppConfig(**(settings | changes))


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(pair):
    """What the target alone writes, in this process."""
    llm = LLM(pair[0], "none", dtype="float32", compile="off")

    def text(**params):
        return llm.generate([PROMPT], SamplingParams(**params))[0].outputs[0].text

    return text


def gauge(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


def children(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                title = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found += [(int(entry.name), title), *children(int(entry.name))]
    return found


def worker(name):
    return next(pid for pid, title in children(os.getpid()) if title.startswith(f"ray::{name}"))


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
        extra_body={"structured_outputs": {"regex": regex}},
    )
    assert response.choices[0].text == reference
    assert re.fullmatch(f"{regex}!?", reference)  # token 0, the end, is also an exclamation mark here
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


def test_the_async_client_gets_several_choices(url):
    async def ask():
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return await client.completions.create(model="tiny", prompt=[PROMPT, "Else"], n=2, max_tokens=4, logprobs=2)

    response = asyncio.run(ask())
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) for choice in response.choices)


def test_a_stream_is_server_sent_events_that_end_in_done(url):
    body = {"prompt": PROMPT, "max_tokens": 6, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "unknown": 1}, 400, "unknown"),
        ({"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        ({"prompt": [300]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({}, 400, "prompt"),
    ],
)
def test_bad_input_is_refused_by_name(url, body, status, param):
    response = httpx.post(f"{url}/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["message"]


def test_a_body_over_the_limit_is_refused_chunked_or_not(url):
    def pieces():
        for _ in range(6):
            yield b"x" * 2**20

    for content in (b"x" * (5 * 2**20), pieces()):
        assert httpx.post(f"{url}/v1/completions", content=content).status_code == 413


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


@pytest.mark.parametrize("name", ["DraftWorker", "TargetWorker"])
def test_a_worker_killed_in_mid_stream_does_not_change_the_text(client, expected, url, name):
    params = {"temperature": 0.8, "seed": 11, "max_tokens": 200}
    reference = expected(ignore_eos=True, **params)
    stream = iter(
        client.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, **params)
    )
    text = "".join(next(stream).choices[0].text for _ in range(3))
    os.kill(worker(name), signal.SIGKILL)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == reference
    deadline = time.monotonic() + 180
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_salts_share_no_cached_tokens(client):
    def cached(salt):
        extra = {"cache_salt": salt} if salt else {}
        answer = client.completions.create(model="tiny", prompt=PROMPT * 4, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    in_full_blocks = (4 * len(PROMPT) - 1) // 16 * 16
    assert [cached(salt) for salt in ("a", "b", "a", "c", "b")] == [0, 0, in_full_blocks, 0, in_full_blocks]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"drafting": "suffix", "draft_model": "none"},
        {"drafting": "self", "self_draft_layers": 1, "draft_model": "none"},
        {"drafting": "tree", "num_speculative_tokens": 6, "run_ahead": "on"},
    ],
    ids=["suffix, without a draft model", "self", "tree that grows on"],
)
def test_other_ways_to_draft_stream_the_text_of_plain_decoding(client, url, pair, expected, changes):
    """Last in this file: the application that the other tests share is deployed anew."""
    serve.run(app(config_of(pair, **changes)))
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline
    for temperature in (0.0, 0.8):
        reference = expected(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
        chunks = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=60,
            temperature=temperature,
            seed=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == reference
    assert gauge(url, "spec_decode_num_draft_tokens_total") > 0
