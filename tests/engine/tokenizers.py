"""Tokenizers small enough to know every token by heart."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.config import ModelConfig
from engine.models.registry import open_model
from engine.models.source import ModelSource

END = 1
"""The end-of-sequence token of the models in these tests."""
_LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-ĠĊ'
_WORDS = ['"name"', '":', '{"', '"}', "true", "false", "null", "ab", "abc", "bc", "12", "],", "}}", 'Ġ"', "Ġ{"]


def json_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: two special ones, JSON's characters, and words that cross its parts."""
    pieces = ["<pad>", "</s>", *_LETTERS, *_WORDS]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Five tokens: a, b, c, d and the end."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "d": 3, "</s>": 4}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens, of which a text's words are marked at their beginning; an end is added to every text, as for T5."""
    pieces = [
        "<pad>",
        "</s>",
        *(f"{mark}{letter}{digit}" for mark in ("▁", "") for letter in "abcdef" for digit in "12345"),
    ]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in [*pieces, "▁", "x"]], unk_id=63))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def sentencepiece_tokenizer(*, strips: bool) -> Tokenizer:
    """A token for each byte, for a word's beginning and for some words: Llama's decoder, or Gemma's without strips."""
    words = [chr(97 + i) for i in range(26)] + ["▁", "▁the", "▁a", "é", "▁漢"]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="a"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return backend


def saved(tokenizer: PreTrainedTokenizerFast, path: object) -> ModelSource:
    """Save a tokenizer and return the source of a model that would have it."""
    tokenizer.save_pretrained(path)
    return open_model(ModelConfig(str(path), dtype="float32", device="cpu"))
