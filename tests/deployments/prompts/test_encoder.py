import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from deployments.openai.chat import ChatCompletionRequest
from deployments.prompts import encoder as prompts
from deployments.prompts.encoder import LONG_CHARS, PromptEncoder
from engine.errors import RequestError
from tests.fakes import byte_tokenizer

ROOM = 10_000
SPECIAL = {256, 257, 258}
PIECES = ["</s>", "<|start|>", "<|end|>", "<|end", "|>", "assistant\n", " ", "hello", "é", "<", "|"]
LONG = "some words and </s> of a client, again " * (2 * LONG_CHARS // 30)


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def conversation(*texts: str, **fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return ChatCompletionRequest.model_validate({"messages": messages, **fields})


async def chat(encoder: PromptEncoder, *texts: str) -> list[int]:
    return await encoder.encode_chat(conversation(*texts), 100 * ROOM)


@given(text=st.lists(st.sampled_from(PIECES), min_size=1).map("".join))
def test_a_prompt_never_holds_a_special_token(encoder: PromptEncoder, text: str) -> None:
    assert not SPECIAL & set(asyncio.run(encoder.encode(text, ROOM)))


async def test_a_harmless_conversation_is_encoded_as_the_template_says(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    conversation = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "hello"}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert await chat(encoder, " hi ", "hello") == expected


@given(texts=st.lists(st.lists(st.sampled_from(PIECES)).map("".join), min_size=1, max_size=3))
def test_only_the_template_writes_special_tokens(encoder: PromptEncoder, texts: list[str]) -> None:
    ids = asyncio.run(chat(encoder, *texts))
    template = asyncio.run(chat(encoder, *("" for _ in texts)))
    assert [i for i in ids if i in SPECIAL] == [i for i in template if i in SPECIAL]
    text = asyncio.run(encoder.decode_tokens(ids))
    assert all(one.strip() in text for one in texts)


async def test_a_model_without_a_template_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(RequestError, match="no chat template"):
        await chat(PromptEncoder(plain), "x")


async def test_a_long_text_and_its_ids_come_back(encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer(LONG, split_special_tokens=True)["input_ids"]
    assert await encoder.encode(LONG, 100 * ROOM) == ids
    assert await encoder.decode_tokens(ids) == LONG
    assert await encoder.decode_each(ids) == encoder.token_bytes.texts(ids) == list(LONG)


@given(
    token_ids=st.lists(st.sampled_from([*range(256), *SPECIAL]) | st.sampled_from([*SPECIAL, 0xE2, 97]), max_size=40)
)
def test_ids_are_decoded_as_the_tokenizer_does(
    encoder: PromptEncoder, tokenizer: PreTrainedTokenizerFast, token_ids: list[int]
) -> None:
    for skips in (True, False):
        text = asyncio.run(encoder.decode_tokens(token_ids, skip_special_tokens=skips))
        assert text == tokenizer.decode(token_ids, skip_special_tokens=skips)


async def test_tokens_around_a_text_are_around_a_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    framing = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="</s>")
    framing.chat_template = "{{ messages[0].content }}"
    framing.backend_tokenizer.post_processor = TemplateProcessing("</s> $A </s> </s>", None, [("</s>", 256)])
    encoder = PromptEncoder(framing)
    ids = await encoder.encode_chat(conversation("b"), ROOM)
    framed = [256, *ids, 256, 256]
    assert await encoder.encode("b", ROOM) == framed
    assert await encoder.encode_chat(conversation("b", add_special_tokens=True), ROOM) == framed


async def test_a_short_text_does_not_wait_for_a_long_one_and_what_nobody_waits_for_is_not_tokenized(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_is_done, long_has_begun = threading.Event(), threading.Event()
    encode = prompts._encode_prompt
    lengths: list[int] = []

    def waiting(tokenizer: object, text: str, adds_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        if len(text) > LONG_CHARS:
            long_has_begun.set()
            assert short_is_done.wait(30)
        return encode(tokenizer, text, adds_special_tokens)

    monkeypatch.setattr(prompts, "_encode_prompt", waiting)
    long = asyncio.create_task(encoder.encode(LONG, 100 * ROOM))
    left = asyncio.create_task(encoder.encode(LONG + "left", 100 * ROOM))
    await asyncio.to_thread(long_has_begun.wait, 30)
    assert len(await encoder.encode("short", ROOM)) == 5
    left.cancel()
    await asyncio.wait([left])
    short_is_done.set()
    assert len(await long) == len(LONG)
    await encoder.encode(LONG + "last", 100 * ROOM)
    assert lengths == [len(LONG), 5, len(LONG) + 4]


async def test_threads_do_not_share_the_flag_that_splits_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer)

    def flag_after(tokenizer: Any, *, splits: bool | None) -> bool:
        if splits is not None:
            tokenizer("</s>", split_special_tokens=splits)
        return bool(tokenizer.backend_tokenizer.encode_special_tokens)

    await encoder._run(lambda tokenizer: flag_after(tokenizer, splits=True), is_long=True)
    await encoder._run(lambda tokenizer: flag_after(tokenizer, splits=False), is_long=False)
    assert await encoder._run(lambda tokenizer: flag_after(tokenizer, splits=None), is_long=True)
