"""Sizes by name, models that begin as the identity, and tokenizers of any text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.training.small_model import Size, build_model, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target)


def test_layers_and_width_decide_the_rest() -> None:
    assert Size.parse("4x96", context=64) == Size(4, 96, 256, heads=3, kv_heads=1, context=64)
    assert Size.parse("2x128") == Size(2, 128, 320, heads=4, kv_heads=2)


def test_a_new_model_has_layers_that_change_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(Size.parse("2x32"), tokenizer, seed=0)
    states = model.model(torch.tensor([[3, 4, 5]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[1], states[0])


def test_a_seed_decides_a_models_weights_and_leaves_the_generator_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(Size.parse("1x32"), tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_any_text_survives_and_the_chat_template_uses_the_role_tokens() -> None:
    tokenizer = train_tokenizer(["call me ishmael " * 50], vocab_size=280, context=64)
    text = "  naïve 鯨 \n\ttab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) <= 280
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "s\n\n<|user|>u<|assistant|>"
    )
    answered = [*chat, {"role": "assistant", "content": "a"}]
    assert str(tokenizer.apply_chat_template(answered, tokenize=False)).endswith("<|assistant|>a<|endoftext|>")
