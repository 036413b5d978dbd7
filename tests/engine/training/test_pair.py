"""The bundled pair, against the figures its card gives."""

import json

import pytest
import torch

from engine.config import BUNDLED_DRAFT, BUNDLED_HEAD, BUNDLED_TARGET, ModelConfig
from engine.heads.registry import load_head
from engine.models.registry import open_model
from engine.training.evaluate import BUNDLED_PROMPTS, read_prompts
from engine.training.head_training import head_acceptance
from engine.training.measured_acceptance import CONTINUATION_TOKENS, continue_prompts
from engine.training.small_model import load_model

PAIR = BUNDLED_TARGET.parent
CARD = json.loads((PAIR / "figures.json").read_text())


@pytest.mark.parametrize(("name", "temperature"), [("temperatures", "0"), ("head", "1")])
def test_the_draft_and_the_head_accept_what_the_card_says(name: str, temperature: str) -> None:
    target, tokenizer = load_model(BUNDLED_TARGET)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in read_prompts(BUNDLED_PROMPTS)]
    continuations = continue_prompts(target, prompts, CONTINUATION_TOKENS, float(temperature))
    if name == "head":
        sources = (open_model(ModelConfig(str(folder))) for folder in (BUNDLED_HEAD, BUNDLED_TARGET))
        head = load_head(*sources, target, target.device, torch.float32, 0)
        acceptance = head_acceptance(head, target, continuations, 4)
    else:
        acceptance = continuations.acceptance(load_model(BUNDLED_DRAFT)[0])
    card = CARD[name][temperature]
    assert acceptance.per_position(4) == pytest.approx(card["acceptance_per_position"], abs=0.05)
    assert acceptance.mean_acceptance_length(4) == pytest.approx(card["mean_acceptance_length"], abs=0.05)


def test_the_card_prints_the_figures() -> None:
    card = (PAIR / "README.md").read_text()
    for figures in [*CARD["temperatures"].values(), *CARD["head"].values()]:
        cells = [f"{rate:.3f}" for rate in figures["acceptance_per_position"]]
        assert " | ".join([*cells, f"{figures['mean_acceptance_length']:.2f}"]) in card


def test_the_pair_is_as_small_as_promised() -> None:
    target, draft = (load_model(folder)[0] for folder in (BUNDLED_TARGET, BUNDLED_DRAFT))
    assert target.num_parameters() <= 12e6
    assert draft.num_parameters() <= 1.5e6
    assert draft.config.num_hidden_layers <= 2
    assert target.config.max_position_embeddings >= 2048
    assert sum(file.stat().st_size for file in PAIR.rglob("*") if file.is_file()) <= 28e6
