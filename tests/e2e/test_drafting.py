"""Applications that draft in other ways stream the text of plain decoding."""

import httpx
import pytest
from ray import serve

from deployments.builder import app
from deployments.config import AppConfig
from deployments.local.environment import serve_environment
from engine.llm import LLM
from engine.params import SamplingParams
from tests.e2e.servers import metrics, serve_on_ray
from tests.models import save_model
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

PROMPT = "A draft is a guess. "


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("target"), seed=1, layers=2, hidden=32)
    return target, save_model(tmp_path_factory.mktemp("draft"), seed=2, layers=1, hidden=16)


@pytest.fixture(scope="module")
def url():
    with serve_on_ray(2, serve_environment(AppConfig())) as url:
        yield url


@pytest.mark.parametrize(
    "changes",
    [
        {"drafting": "suffix", "draft_model": "none"},
        {"drafting": "self", "self_draft_layers": 1, "draft_model": "none"},
        {"drafting": "tree", "num_speculative_tokens": 6, "run_ahead": "on"},
    ],
    ids=["suffix, without a draft model", "self", "tree that grows on"],
)
def test_other_ways_to_draft_write_the_text_of_plain_decoding(url, pair, changes):
    names = {"target_model": pair[0], "draft_model": pair[1], "dtype": "float32", "compile": "off"}
    serve.run(app(AppConfig(**(names | {"speculation": "fixed"} | changes))))
    wait_until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200, 60)
    llm = LLM(pair[0], "none", dtype="float32", compile="off")
    for temperature in (0.0, 0.8):
        params = {"temperature": temperature, "seed": 5, "max_tokens": 60, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, **params}, timeout=60).json()
        assert answer["choices"][0]["text"] == llm.generate([PROMPT], SamplingParams(**params))[0].outputs[0].text
    assert metrics(url).total("vllm:spec_decode_num_draft_tokens_total") > 0
