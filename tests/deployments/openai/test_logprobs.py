"""A prompt that comes back with its log probabilities: the exact ones, whole, in a stream, for every choice."""

import codecs
import itertools
import math
import re
from typing import Any

import httpx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from deployments.openai.logprobs import TextOffsets, completion_logprobs
from deployments.openai.writer import Choice
from engine.config import BUNDLED_TARGET, ModelConfig
from engine.models.registry import open_model
from engine.protocols import TokenLogprobs
from engine.requests.detokenizer import Detokenizer, TokenBytes
from tests.deployments.fakes import Rig
from tests.deployments.requests import events
from tests.engine.tokenizers import sentencepiece_tokenizer, word_tokenizer
from tests.fakes import byte_tokenizer

PROMPT = "abc"
SPECIAL = "<mark>"


def _with_mark(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


TOKENIZERS = {
    "bytes": _with_mark(byte_tokenizer()),
    "bundled": _with_mark(open_model(ModelConfig(str(BUNDLED_TARGET))).tokenizer.backend_tokenizer),
    "gemma": _with_mark(sentencepiece_tokenizer(strips=False)),
    "llama": _with_mark(sentencepiece_tokenizer(strips=True)),
    "words": _with_mark(word_tokenizer().backend_tokenizer),
}


def law(rig: Rig) -> Any:
    return rig.engine.verifier._verifier.backend.transitions  # type: ignore[attr-defined]


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("!") for letter in text]


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    sent = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 2, **body}
    response = await client.post("/v1/completions", json=sent)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_first_token_has_none_the_others_have_the_targets(client: httpx.AsyncClient, rig: Rig) -> None:
    choice = (await complete(client))["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert logprobs["tokens"] == list(text)
    assert text.startswith(PROMPT)
    assert len(text) == 7
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    tokens = ids(text)
    expected = [math.log(law(rig)[before, token]) for before, token in itertools.pairwise(tokens)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:])
    assert all(logprobs["top_logprobs"][i][text[i]] == logprobs["token_logprobs"][i] for i in range(1, 7))


@pytest.mark.parametrize(("logprobs", "max_tokens", "n"), [(2, 4, 2), (2, 0, 1), (None, 0, 1)])
async def test_a_stream_says_the_same(client: httpx.AsyncClient, logprobs: int | None, max_tokens: int, n: int) -> None:
    sent = {"prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": logprobs, "n": n, "ignore_eos": False}
    whole = await complete(client, **sent)
    chunks = await events(client, "/v1/completions", **sent, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == max_tokens * n
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


async def test_a_prompt_seen_before_loses_none(client: httpx.AsyncClient) -> None:
    prompt = [token % 90 for token in range(100)]
    plain = await complete(client, prompt=prompt, echo=False)
    again = await complete(client, prompt=prompt, echo=False)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    echoed = await complete(client, prompt=prompt)
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == 104
    assert logprobs[100:] == plain["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_prompt_is_scored_without_a_token(client: httpx.AsyncClient, n: int) -> None:
    expected = (await complete(client))["choices"][0]["logprobs"]
    scored = await complete(client, max_tokens=0, n=n, return_token_ids=True)
    for choice in scored["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        assert choice["logprobs"] == {name: values[:3] for name, values in expected.items()}
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["total_tokens"] == scored["usage"]["prompt_tokens"] == 3
    assert len((await complete(client, max_tokens=0, prompt=[5]))["choices"][0]["logprobs"]["tokens"]) == 1
    plain = await complete(client, max_tokens=0, logprobs=None)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == (PROMPT, None)


async def test_tokens_inside_characters_have_their_own_bytes_and_places(client: httpx.AsyncClient) -> None:
    text = "a 🌍 é"
    scored = (await complete(client, prompt=text, max_tokens=0, logprobs=0))["choices"][0]["logprobs"]
    assert scored["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4, 4]
    only = {"structured_outputs": {"choice": [text]}, "max_tokens": 20, "temperature": 0}
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **only}
    whole = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
    streamed = await events(client, "/v1/chat/completions", ignore_eos=False, **asked)
    chunks = [entry for chunk in streamed for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert chunks == whole["logprobs"]["content"]
    assert [entry["bytes"] for entry in chunks[: len(text.encode())]] == [[byte] for byte in text.encode()]
    assert all(
        len(top["bytes"]) == 1 for entry in chunks[:9] for top in entry["top_logprobs"] if len(top["token"]) == 1
    )
    completion = await complete(client, echo=False, logprobs=1, **only)
    assert completion["choices"][0]["text"] == text
    assert completion["choices"][0]["logprobs"]["text_offset"][:9] == scored["text_offset"]


@given(data=st.data(), name=st.sampled_from([*TOKENIZERS]), echoes=st.booleans(), skips=st.booleans())
def test_tokens_begin_where_their_bytes_are_in_the_text(data: Any, name: str, echoes: bool, skips: bool) -> None:
    tokenizer = TOKENIZERS[name]
    token_bytes, mark = TokenBytes(tokenizer), tokenizer.token_to_id(SPECIAL)
    alphabet = "abcdef12345" if name == "words" else "ab é漢🌍the"
    ids = tokenizer.encode(data.draw(st.text(alphabet + " ", min_size=1)), add_special_tokens=False).ids
    if name in ("bytes", "bundled"):  # a broken character of the others spoils whole ones beside it
        ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=9)) or ids
    if name in ("llama", "gemma") and data.draw(st.booleans()):
        ids.insert(0, tokenizer.token_to_id("▁the"))
    # Python finds out late that half a surrogate is invalid.
    assume(not re.search(rb"\xed[\xa0-\xbf]", b"".join(map(token_bytes, ids))))
    places = st.integers(0, len(ids)) if name in ("bytes", "bundled", "words") else st.sampled_from([0, len(ids)])
    for place in sorted(data.draw(st.lists(places, max_size=2)), reverse=True):
        ids.insert(place, mark)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=skips)
    text = detokenizer.append(output)[0] + detokenizer.finish()
    offsets, shown = TextOffsets(token_bytes, [] if echoes else prompt, skips_special=skips), b""
    if echoes:
        echo = tokenizer.decode(prompt, skip_special_tokens=True)
        # The echo ends as if nothing followed; special tokens alone have no echo, but may begin the text.
        assume(echo and not echo.endswith("\ufffd"))
        text = echo + text
    else:  # a character that the prompt began belongs to that
        before = codecs.getincrementaldecoder("utf-8")("replace")
        hidden = token_bytes.special_ids if skips else ()
        before.decode(b"".join(token_bytes(token) for token in prompt if token not in hidden))
        shown = before.getstate()[0]
    num_before = len(shown.decode(errors="replace"))
    tokens = ids if echoes else output
    # Two bytes of characters look alike; the likelier one is shown.
    score = TokenLogprobs(-1.5, 2, (likely := tokenizer.encode("é漢").ids[-2:]), [-1.0, -2.0])
    scores = [score] * (len(prompt) - 1) if echoes else None
    choice = Choice(0, prompt, token_ids=output, logprobs=[score] * len(output))
    logprobs = completion_logprobs(choice, choice, scores, token_bytes, offsets)
    is_first = echoes or all(token in token_bytes.special_ids and skips for token in prompt)
    for index, (token, start) in enumerate(zip(tokens, logprobs.text_offset, strict=True)):
        is_hidden = token in token_bytes.special_ids and (skips or (echoes and index < len(prompt)))
        data_of = b"" if is_hidden else token_bytes(token, is_first=is_first)
        if data_of:
            assert start == max(0, len((shown + data_of[:1]).decode(errors="replace")) - 1 - num_before)
            assert logprobs.tokens[index] == data_of.decode(errors="replace")
            if index or not echoes:
                second, first = token_bytes.texts(likely[::-1], is_first=is_first)
                assert logprobs.top_logprobs[index] == {second: -2.0, first: -1.0, logprobs.tokens[index]: -1.5}
        is_first &= is_hidden
        shown += data_of
    assert shown.decode(errors="replace")[num_before:] == text
