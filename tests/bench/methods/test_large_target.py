"""The large target computes what the small one computes."""

from engine import LLM, SamplingParams
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.bench.methods.large_target import make_large_target


def test_the_large_target_writes_the_small_ones_text_and_accepts_the_same_drafts(tmp_path):
    large = make_large_target(BUNDLED_TARGET, tmp_path, num_layers=14, intermediate_size=640)
    prompts, settings = (
        ["This PEP proposes", "def add(a, b):"],
        {"dtype": "float32", "compile": "off", "num_blocks": 40},
    )
    results = []
    for target in (BUNDLED_TARGET, large):
        llm = LLM(target, BUNDLED_DRAFT, speculation="fixed", **settings)
        for temperature in (0.0, 0.7):
            for result in llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=24, seed=3)):
                results.append((target == large, result.outputs[0].token_ids, result.outputs[0].stats))
    small, wide = ([output[1:] for output in results if output[0] == is_large] for is_large in (False, True))
    assert small == wide
