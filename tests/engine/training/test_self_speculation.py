"""What a set of skipped sub-layers promises: costs are sums, acceptance is the engine's, the bound holds."""

import pytest
import torch

from engine.config import ModelConfig
from engine.execution.registry import load_backend
from engine.sampling.params import SamplingParams
from engine.training.self_speculation import Costs, gain, highest_speedup, measure_acceptance, measure_costs
from tests.engine.conftest import VOCAB, save_llama
from tests.fakes import SelfDraftingModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_draft_costs_what_the_target_costs_less_what_it_skips():
    costs = Costs(4, 10.0, 0.5, 1.0, 2.0)
    assert costs.ratio([]) == 1.0
    assert costs.ratio(["attention.0", "attention.3", "mlp.1"]) == pytest.approx(0.8)
    assert costs.ratio(["attention.1", "mlp.1"]) == pytest.approx(0.85)
    assert costs.ratio(["attention.0", "attention.2", "mlp.2", "mlp.3", "attention.3"]) == pytest.approx(0.55)
    assert Costs(4, 10.0, 0.5, 3.0, 2.0).ratio([f"mlp.{index}" for index in range(4)]) == 0.01


def test_costs_of_a_model_are_not_negative(tmp_path):
    target = load_backend(ModelConfig(save_llama(tmp_path, seed=1), dtype="float32", device="cpu"))
    costs = measure_costs(target, 2)
    assert costs.whole_ms > 0
    assert min(costs.attention_ms, costs.mlp_ms, costs.layer_ms) >= 0


def test_the_gain_is_that_of_the_best_number_of_draft_tokens():
    found = gain([0.9, 0.5, 0.01], 0.25)
    assert found.num_speculative_tokens == 2
    assert found.speedup == pytest.approx(2.4 / 1.5)
    assert gain([0.1], 0.5).speedup == pytest.approx(1.1 / 1.5)


def test_no_acceptance_promises_more_than_the_bound():
    assert highest_speedup(4, 0.25) == pytest.approx(5 / 2)
    for rates in ([1.0] * 4, [1.0, 1.0, 0.9, 0.2], [0.0] * 4):
        assert gain(rates, 0.25).speedup <= highest_speedup(4, 0.25)


def laws(seed):
    return (4 * torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def test_a_draft_that_draws_as_the_target_does_is_accepted_whole():
    prompts = [[5, 9, 2], [7] * 20]
    skipped = ["mlp.1", "attention.1"]
    like = measure_acceptance(SelfDraftingModel(laws(1), laws(1)), skipped, prompts, GREEDY, 3)
    assert like == [1.0, 1.0, 1.0], "no draft is cut short by the end of its text"
    unlike = measure_acceptance(SelfDraftingModel(laws(1), laws(2)), skipped, prompts, GREEDY, 3)
    assert unlike[0] < 0.7
    assert sorted(unlike, reverse=True) == unlike
