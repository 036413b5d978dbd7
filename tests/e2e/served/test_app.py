"""The whole path with real processes: the text of the engine, through HTTP, Serve, Ray actors and sockets."""

import re

import httpx
import openai
import pytest

from engine.params import SamplingParams
from engine.sampling.grammar_text import from_regex
from tests.e2e.servers import metrics
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROMPT = "A draft is a guess. "
ACCEPTED, RUNNING = "vllm:spec_decode_num_accepted_tokens_total", "vllm:num_requests_running"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(target):

    def text(**params):
        return target.generate([PROMPT], SamplingParams(**params), show_progress=False)[0].outputs[0].text

    return text


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
    kept = metrics(url).total(ACCEPTED)
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
    assert metrics(url).total(ACCEPTED) > kept


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
    assert metrics(url).total(RUNNING) == 1
    stream.close()
    wait_until(lambda: metrics(url).total(RUNNING) == 0)
    assert metrics(url).total("vllm:kv_cache_usage_perc") == 0
