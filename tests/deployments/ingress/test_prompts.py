import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.ingress import pieces, prompts
from deployments.ingress.pieces import PIECE_CHARS
from deployments.ingress.prompts import PromptEncoder
from deployments.openai.messages import ChatMessage, SystemMessage, message_of
from engine.errors import PromptTooLongError, RequestError

ROOM = 10_000
SPECIAL = {256, 257, 258}
PIECES = ["</s>", "<|start|>", "<|end|>", "<|end", "|>", "assistant\n", " ", "hello", "é", "<", "|"]
LONG = "some words and </s> of a client, again " * (3 * PIECE_CHARS // 30)


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def messages(*texts: str) -> list[ChatMessage]:
    return [message_of("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


async def chat(encoder: PromptEncoder, *texts: str) -> list[int]:
    return await encoder.encode_chat(messages(*texts), 100 * ROOM)


async def test_text_comes_back(encoder: PromptEncoder) -> None:
    ids = await encoder.encode("Grüße </s>", ROOM)
    assert await encoder.decode_tokens(ids) == "Grüße </s>"


async def test_no_text_is_the_beginning_of_a_document(encoder: PromptEncoder) -> None:
    assert await encoder.encode("", ROOM) == [256]
    with pytest.raises(RequestError, match="empty"):
        await encoder.encode("", ROOM, adds_special_tokens=False)


@given(text=st.lists(st.sampled_from(PIECES), min_size=1).map("".join))
def test_a_prompt_never_holds_a_special_token(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert not SPECIAL & set(asyncio.run(PromptEncoder(tokenizer).encode(text, ROOM)))


async def test_a_harmless_conversation_is_encoded_as_the_template_says(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    conversation = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "hello"}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert await chat(encoder, " hi ", "hello") == expected


@given(texts=st.lists(st.lists(st.sampled_from(PIECES)).map("".join), min_size=1, max_size=3))
def test_only_the_template_writes_special_tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
    encoder = PromptEncoder(tokenizer)
    ids = asyncio.run(chat(encoder, *texts))
    template = asyncio.run(chat(encoder, *("" for _ in texts)))
    assert [i for i in ids if i in SPECIAL] == [i for i in template if i in SPECIAL]
    text = asyncio.run(encoder.decode_tokens(ids))
    assert all(one.strip() in text for one in texts)


async def test_developer_is_system_and_parts_are_joined(encoder: PromptEncoder) -> None:
    parts = SystemMessage.model_validate(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    )
    assert "system\nab" in await encoder.decode_tokens(await encoder.encode_chat([parts], ROOM))


async def test_a_text_that_cannot_fit_is_refused_unread(encoder: PromptEncoder) -> None:
    with pytest.raises(PromptTooLongError, match="1,000,000 characters"):
        await encoder.encode("a" * 1_000_000, 100)


async def test_a_conversation_the_template_refuses_is_a_request_error(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="assistant first"):
        await encoder.encode_chat([message_of("assistant", "x")], ROOM)


async def test_a_model_without_a_template_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(RequestError, match="no chat template"):
        await chat(PromptEncoder(plain), "x")


async def test_a_long_text_has_the_ids_of_the_whole(encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenizer(LONG, split_special_tokens=True)["input_ids"]
    assert await encoder.encode(LONG, 100 * ROOM) == whole
    assert await encoder.decode_tokens(whole) == LONG
    assert await encoder.decode_each(whole) == encoder.token_texts(whole) == list(LONG)


@given(
    token_ids=st.lists(st.sampled_from([*range(256), *SPECIAL]) | st.sampled_from([*SPECIAL, 0xE2, 97]), max_size=40)
)
def test_special_tokens_are_left_out_before_ids_are_cut(
    tokenizer: PreTrainedTokenizerFast, token_ids: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_IDS", 3)
        text = asyncio.run(PromptEncoder(tokenizer).decode_tokens(token_ids, skip_special_tokens=True))
    assert text == tokenizer.decode(token_ids, skip_special_tokens=True)


async def test_a_long_conversation_has_the_ids_of_a_short_one(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces = await chat(encoder, LONG, "short")
    many = await chat(encoder, *(f"message {number} </s>" for number in range(100)))
    monkeypatch.setattr(prompts, "PIECE_CHARS", 10 * len(LONG))
    monkeypatch.setattr(prompts, "MANY_MESSAGES", 1000)
    assert await chat(encoder, LONG, "short") == in_pieces
    assert await chat(encoder, *(f"message {number} </s>" for number in range(100))) == many


async def test_a_text_with_too_many_tokens_is_not_tokenized_to_its_end(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = prompts._encode

    def counted(tokenizer: object, text: str, is_clients: bool) -> list[int]:
        sizes.append(len(text))
        return encode(tokenizer, text, is_clients)

    monkeypatch.setattr(prompts, "_encode", counted)
    with pytest.raises(PromptTooLongError, match="prompt has more than 10,000 tokens"):
        await encoder.encode(LONG, 100 * ROOM, max_ids=ROOM)
    assert sum(sizes) < len(LONG) / 2


async def test_a_short_text_does_not_wait_for_a_long_one(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_is_done, long_has_begun = threading.Event(), threading.Event()
    encode = prompts._encode

    def waiting(tokenizer: object, text: str, is_clients: bool) -> list[int]:
        long_has_begun.set()
        assert short_is_done.wait(30)
        return encode(tokenizer, text, is_clients)

    monkeypatch.setattr(prompts, "_encode", waiting)
    long = asyncio.create_task(encoder.encode(LONG, 100 * ROOM))
    await asyncio.to_thread(long_has_begun.wait, 30)
    assert len(await encoder.encode("short", ROOM)) == 5
    short_is_done.set()
    assert len(await long) == len(LONG)


async def test_a_text_that_nobody_waits_for_is_left_after_its_piece(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    num_pieces = 0

    def counted(tokenizer: object, text: str, is_clients: bool) -> list[int]:
        nonlocal num_pieces
        num_pieces += 1
        has_begun.set()
        assert may_end.wait(30)
        return []

    monkeypatch.setattr(prompts, "_encode", counted)
    long = asyncio.create_task(encoder.encode(LONG, 100 * ROOM))
    await asyncio.to_thread(has_begun.wait, 30)
    long.cancel()
    await asyncio.wait([long])
    may_end.set()
    monkeypatch.setattr(prompts, "_encode", lambda *_: [1])
    await encoder.encode(LONG, 100 * ROOM)  # when this one is done, the thread has nothing left to do
    assert num_pieces == 1
