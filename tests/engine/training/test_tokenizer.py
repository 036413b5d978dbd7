import pytest

from engine.training.errors import TrainingError
from engine.training.tokenizer import train_tokenizer


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


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(TrainingError, match="vocabulary has 100"):
        train_tokenizer(["text"], vocab_size=100, context=64)
