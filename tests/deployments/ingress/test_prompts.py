import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.ingress.prompts import PromptEncoder
from deployments.openai.messages import ChatMessage
from engine.errors import PromptTooLongError, RequestError

ROOM = 10_000
SPECIAL = {256, 257, 258}
PIECES = ["</s>", "<|start|>", "<|end|>", "<|end", "|>", "assistant\n", " ", "hello", "é", "<", "|"]


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def chat(encoder: PromptEncoder, *texts: str) -> list[int]:
    roles = ["user", "assistant"]
    messages = [ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(texts)]
    return encoder.encode_chat(messages, ROOM)


def test_text_comes_back(encoder: PromptEncoder) -> None:
    assert encoder.decode(encoder.encode("Grüße </s>", ROOM)) == "Grüße </s>"


@given(text=st.lists(st.sampled_from(PIECES)).map("".join))
def test_a_prompt_never_holds_a_special_token(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert not SPECIAL & set(PromptEncoder(tokenizer).encode(text, ROOM))


def test_a_harmless_conversation_is_encoded_as_the_template_says(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    conversation = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "hello"}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert chat(encoder, " hi ", "hello") == expected


@given(texts=st.lists(st.lists(st.sampled_from(PIECES)).map("".join), min_size=1, max_size=3))
def test_only_the_template_writes_special_tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    encoder = PromptEncoder(tokenizer)
    ids = chat(encoder, *texts)
    template = chat(encoder, *("" for _ in texts))
    assert [i for i in ids if i in SPECIAL] == [i for i in template if i in SPECIAL]
    text = encoder.decode(ids)
    assert all(one.strip() in text for one in texts)


def test_developer_is_system_and_parts_are_joined(encoder: PromptEncoder) -> None:
    parts = ChatMessage.model_validate(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert "system\nab" in encoder.decode(encoder.encode_chat([parts], ROOM))


def test_a_text_that_cannot_fit_is_refused_unread(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLongError, match="1,000,000 characters"):
        encoder.encode("a" * 1_000_000, 100)


def test_a_conversation_the_template_refuses_is_a_request_error(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="assistant first"):
        encoder.encode_chat([ChatMessage(role="assistant", content="x")], ROOM)


def test_a_model_without_a_template_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(RequestError, match="no chat template"):
        chat(PromptEncoder(plain), "x")


async def test_calls_run_on_one_thread(encoder: PromptEncoder) -> None:
    assert await encoder.run(encoder.decode, [64]) == "a"
