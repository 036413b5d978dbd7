"""What a request gets does not depend on how its tokens were cut into rounds."""

import random

import pytest

from engine.config import BUNDLED_TARGET, ModelConfig
from engine.detokenizer import Detokenizer
from engine.draft import Verdict
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from engine.vocabulary import load_tokenizer
from tests.fakes import byte_tokenizer

TEXT = "Déjà vu: ein «Überraschungsei», 漢字とかな, 🙂👩‍👩‍👧 — the end. "
PROMPT = "Text: "


def tokenizers():
    return {"bundled": load_tokenizer(ModelConfig(str(BUNDLED_TARGET))).backend_tokenizer, "bytes": byte_tokenizer()}


def committed(tokenizer, token_ids, cuts, params, end_ids):
    """Commit tokens round by round, each of `cuts` tokens; what came of them, joined."""
    prompt = tokenizer.encode(PROMPT).ids
    detokenizer = Detokenizer(tokenizer, prompt, stop=params.stop)
    sequence = Sequence("a", [*prompt], len(prompt), params, b"", frozenset(end_ids), detokenizer)
    text, ids, left = "", [], list(token_ids)
    while left and sequence.finish_reason is None:
        count = next(cuts)
        output = sequence.commit(Verdict(left[:count]), count - 1)
        text, ids, left = text + output.text, ids + output.token_ids, left[count:]
    return text, ids, sequence.finish_reason, sequence.stop_reason


def ones():
    while True:
        yield 1


def random_cuts(seed):
    generator = random.Random(seed)
    while True:
        yield generator.randint(1, 6)


@pytest.mark.parametrize("name", ["bundled", "bytes"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop": ("かな", "the")},
        {"stop": ("the",), "include_stop_str_in_output": True},
        {"include_stop_str_in_output": True},
        {"min_tokens": 30, "stop": ("ein", "end")},
        {"min_tokens": 30},
        {"max_tokens": 23},
        {"ids": True},
    ],
)
def test_rounds_do_not_change_what_a_request_gets(name, seed, settings):
    tokenizer = tokenizers()[name]
    token_ids = tokenizer.encode(TEXT * 2).ids
    settings = dict(settings)
    stops = [token_ids[25]] if settings.pop("ids", False) else []
    params = SamplingParams(**{"max_tokens": len(token_ids), "stop_token_ids": stops, **settings})
    ends = [token_ids[33]] if not stops else []
    alone = committed(tokenizer, token_ids, ones(), params, ends)
    assert committed(tokenizer, token_ids, random_cuts(seed), params, ends) == alone
    assert alone[2] is not None


@pytest.mark.parametrize("name", ["bundled", "bytes"])
def test_the_whole_text_comes_out(name):
    tokenizer = tokenizers()[name]
    token_ids = tokenizer.encode(TEXT).ids
    params = SamplingParams(max_tokens=len(token_ids))
    for seed in range(8):
        assert committed(tokenizer, token_ids, random_cuts(seed), params, ())[0] == TEXT
