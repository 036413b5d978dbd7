"""The light pair: a draft that agrees as often as a real one, over a tokenizer of both."""

from pathlib import Path

import pytest

from engine.llm import LLM
from engine.sampling.params import SamplingParams
from tests.bench.light_pair import make_light_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_light_pair(tmp_path_factory.mktemp("light"))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_its_draft_is_accepted_about_as_often_as_the_bundled_one(temperature: float, pair: tuple[Path, Path]) -> None:
    llm = LLM(*pair, speculation="fixed", compile="off", device="cpu")
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(8)]
    outputs = llm.generate([[seed, 70, 80] for seed in range(8)], params, show_progress=False)
    assert 2.6 < llm.stats.mean_acceptance_length < 4.2
    assert min(len(set(output.outputs[0].token_ids)) for output in outputs) > 20, "the text does not repeat itself"


def test_its_tokenizer_has_every_byte(pair: tuple[Path, Path]) -> None:
    tokenizer = LLM(*pair, compile="off", device="cpu").tokenizer
    text = "Grüße, 字\n\tdef f(x): pass"
    assert tokenizer.decode(tokenizer.encode(text)) == text
