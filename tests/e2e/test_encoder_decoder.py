"""T5 with a draft over real processes: transformers' text, also after a SIGKILL, and refusals by name."""

import time

import httpx
import openai
import pytest
import torch
from ray import serve
from transformers import AutoModelForSeq2SeqLM, T5Config

from deployments.builder import app
from deployments.config import AppConfig
from deployments.local.environment import serve_environment
from tests.e2e.servers import descendants, serve_on_ray
from tests.engine.tiny import T5_SIZES, save
from tests.engine.tokenizers import word_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

PROMPT = "a1 b2c3 d4 f5 f5"
SEED = {"target": 1, "draft": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    paths = [tmp_path_factory.mktemp(name) for name in SEED]
    for path, seed in zip(paths, SEED.values(), strict=True):
        save(T5Config(**T5_SIZES), path, seed=seed, factor=3.0)
        word_tokenizer().save_pretrained(path)
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def url(pair):
    with serve_on_ray(2, serve_environment(AppConfig())) as url:
        names = {"target_model": pair[0], "draft_model": pair[1], "served_model_name": "t5"}
        serve.run(app(AppConfig(**names, dtype="float32", speculation="fixed")))
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(pair):
    module = AutoModelForSeq2SeqLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    tokenizer = word_tokenizer()

    def text(length):
        settings = {"max_new_tokens": length, "do_sample": False, "use_cache": False, "eos_token_id": None}
        output = module.generate(torch.tensor([tokenizer(PROMPT)["input_ids"]]), **settings)
        return tokenizer.decode(output[0], skip_special_tokens=True)

    return text


def request(length, **fields):
    extra = {"ignore_eos": True, **fields}
    return {"model": "t5", "prompt": PROMPT, "max_tokens": length, "temperature": 0, "extra_body": extra}


@pytest.mark.parametrize("fields", [{}, {"speculative": {"enabled": False}}], ids=["drafts", "plain"])
def test_the_text_is_that_of_transformers(client, expected, fields):
    answer = client.completions.create(**request(40, **fields))
    assert answer.choices[0].text == expected(40)
    assert answer.usage.prompt_tokens == len(word_tokenizer()(PROMPT)["input_ids"])
    assert answer.usage.completion_tokens == 40
    chunks = client.completions.create(**request(40, **fields), stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(40)


@pytest.mark.parametrize("name", ["DraftWorker", "TargetWorker"])
def test_a_worker_killed_in_mid_stream_does_not_change_the_text(client, expected, url, name):
    stream = iter(client.completions.create(**request(300), stream=True))
    text = next(stream).choices[0].text
    for process in descendants(f"ray::{name}"):
        process.kill()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected(300)
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/ready", timeout=60).status_code != 200:
        assert time.monotonic() < deadline
