"""The pieces of a text have the token ids of the whole, and the pieces of ids its text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

from deployments.ingress import pieces
from deployments.ingress.pieces import WORDS, Pieces
from engine.config import BUNDLED_TARGET, ModelConfig
from engine.models.tokenizer import load_tokenizer
from tests.fakes import byte_tokenizer

PARTS = [
    "a",
    "Z",
    " b",
    "  ",
    " ",
    "\n",
    "'s",
    " 't",
    "é",
    "e\u0301",
    "ß",
    "日本",
    "🙂",
    "7",
    "123",
    ".",
    "...",
    "\t",
    "\u00a0",
]
PARTS += ["the", " of", " words", "<|user|>", "</s>", "don't", " x"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=60).map("".join)


def bundled() -> PreTrainedTokenizerFast:
    return load_tokenizer(ModelConfig(str(BUNDLED_TARGET)))


def with_words(expression: str, *, normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerFast:
    """The bundled vocabulary over words cut by another expression."""
    backend = Tokenizer.from_str(bundled().backend_tokenizer.to_str())
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {
    "bundled": bundled(),
    "llama": with_words(WORDS[0]),
    "qwen": with_words(WORDS[1], normalizer=normalizers.NFC()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("splits", [True, False])
@settings(max_examples=60)
@given(text=TEXTS)
def test_pieces_have_the_ids_of_the_whole(name: str, splits: bool, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    cutter = Pieces(tokenizer)
    assert cutter.cuts_texts

    def ids(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False, split_special_tokens=splits)["input_ids"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARS", 3)
        parts = list(cutter.of_text(text))
    assert "".join(parts) == text
    assert [token_id for part in parts for token_id in ids(part)] == ids(text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(token_ids=st.lists(st.integers(0, 4095), max_size=60))
def test_pieces_of_ids_have_the_text_of_the_whole(name: str, token_ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_IDS", 3)
        parts = list(Pieces(tokenizer).of_ids(token_ids))
    assert [token_id for part in parts for token_id in part] == token_ids
    assert "".join(tokenizer.decode(part) for part in parts) == tokenizer.decode(token_ids)


def test_a_text_is_cut_and_a_stretch_without_a_cut_gives_an_empty_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 4)
    cutter = Pieces(TOKENIZERS["bundled"])
    assert list(cutter.of_text("ab cd ef gh")) == ["ab cd", "", " ef gh"]
    assert list(cutter.of_text("x" * 12)) == ["", "", "x" * 12]


def test_what_is_put_around_a_text_is_found() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>")
    tokens = [("<s>", 256), ("</s>", 257)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=tokens)
    assert Pieces(tokenizer).frame == ([256], [257])
    assert Pieces(TOKENIZERS["bundled"]).frame == ([], [])


def byte_level(**settings: bool) -> PreTrainedTokenizerFast:
    backend = byte_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **settings})
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_token(**settings: bool) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("of the" if not settings else "of", **settings)])
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    backend = byte_tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(use_regex=False),
        byte_level(add_prefix_space=True),
        with_token(),
        with_token(rstrip=True),
        with_token(lstrip=True),
        with_token(single_word=True),
        with_words(r"\p{L}+ \p{L}+"),
        with_words(WORDS[0], normalizer=normalizers.Lowercase()),
        metaspace(),
    ],
)
def test_a_tokenizer_that_may_look_over_a_space_gets_whole_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    cutter = Pieces(tokenizer)
    assert not cutter.cuts_texts
    assert list(cutter.of_text("some words " * 10_000)) == ["some words " * 10_000]
