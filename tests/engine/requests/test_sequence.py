"""What a request gets does not depend on how its tokens were cut into rounds."""

import random
from dataclasses import replace

import pytest

from engine.config import BUNDLED_TARGET, ModelConfig
from engine.errors import RequestError
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import Draft, Request, Verdict
from engine.requests.detokenizer import Detokenizer
from engine.requests.output import RoundTrace
from engine.requests.sequence import Sequence
from tests.engine.tokenizers import sentencepiece_tokenizer
from tests.fakes import byte_tokenizer

TEXT = "Déjà vu: ein «Überraschungsei», 漢字とかな, 🙂👩‍👩‍👧 — the end. "
PROMPT = "Text: "


def tokenizers():
    return {
        "fallback": sentencepiece_tokenizer(strips=False),
        "bundled": open_model(ModelConfig(str(BUNDLED_TARGET))).tokenizer.backend_tokenizer,
        "bytes": byte_tokenizer(),
    }


def new_sequence(tokenizer, params, end_ids):
    prompt = tokenizer.encode(PROMPT).ids
    detokenizer = Detokenizer(tokenizer, prompt, stop=params.stop)
    return Sequence(Request("a", [*prompt], len(prompt), params), frozenset(end_ids), detokenizer)


def committed(tokenizer, token_ids, cuts, params, end_ids, moves=False):
    """Commit tokens round by round, each of `cuts` tokens; what came of them, joined. Texts are decoded at the end.

    With `moves`, every other round is committed to a new sequence that was given the output so far.
    """
    sequence = new_sequence(tokenizer, params, end_ids)
    outputs, ids, left = [], [], list(token_ids)
    while left and sequence.finish_reason is None:
        if moves and len(ids) % 2:
            sequence = new_sequence(tokenizer, params, end_ids)
            sequence.resume([*ids])
        count = next(cuts)
        output = sequence.commit(Verdict(left[:count]))
        outputs.append((sequence, output))
        ids, left = ids + output.token_ids, left[count:]
    for committer, output in outputs:
        committer.decode(output)
    return "".join(output.text for _, output in outputs), ids, sequence.finish_reason, sequence.stop_reason


def commit(sequence, verdict):
    output = sequence.commit(verdict)
    sequence.decode(output)
    return output


@pytest.mark.parametrize("name", ["fallback", "bundled", "bytes"])
@pytest.mark.parametrize("stop", [(), ("かな", "the")])
def test_the_text_of_each_number_of_tokens_is_the_same_with_any_rounds_and_traced(name, stop):
    """A stream can be continued in the middle of a round, and traces say which token brought which text."""
    tokenizer = tokenizers()[name]
    token_ids = tokenizer.encode(TEXT * 2).ids
    params = SamplingParams(max_tokens=len(token_ids), stop=stop, min_tokens=len(token_ids))
    traced = new_sequence(tokenizer, replace(params, traces_rounds=True), ())
    trace = traced.commit(Verdict(token_ids)).trace
    assert len(trace.texts) == len(token_ids)
    for seed in range(4):
        sequence, cuts, num_tokens, text = new_sequence(tokenizer, params, ()), random_cuts(seed), 0, ""
        while sequence.finish_reason is None:
            output = commit(sequence, Verdict(token_ids[num_tokens:][: next(cuts)]))
            num_tokens, text = num_tokens + len(output.token_ids), text + output.text
            assert text == "".join(trace.texts[:num_tokens])


def test_a_trace_holds_the_draft_and_how_much_of_it_was_committed():
    a, b, c = byte_tokenizer().encode("abc").ids
    verdict = Verdict([a, b, c], path=[0, 1], draft=Draft([a, b, a], [-1, 0, 1]))
    assert first_output(verdict).trace is None
    output = first_output(verdict, traces_rounds=True)
    assert output.trace == RoundTrace(["a", "b", "c"], [0, 1], [a, b, a], [-1, 0, 1])
    assert first_output(verdict, traces_rounds=True, max_tokens=1).trace == RoundTrace(
        ["a"], [0], [a, b, a], [-1, 0, 1]
    )


def first_output(verdict, *, end_ids=(), **params):
    """What a request with a prompt of one token gets of its first round."""
    detokenizer = Detokenizer(byte_tokenizer(), [0], stop=params.get("stop", ()))
    params = SamplingParams(**{"max_tokens": 9, **params})
    return commit(Sequence(Request("a", [0], 1, params), frozenset(end_ids), detokenizer), verdict)


def test_the_stop_reason_is_a_stop_token_but_not_the_end_of_text():
    a, b, c = byte_tokenizer().encode("abc").ids
    output = first_output(Verdict([a, b, c]), end_ids=[b])
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", None)
    output = first_output(Verdict([a, b, c]), stop_token_ids=[b], end_ids=[b])
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", b)
    output = first_output(Verdict([a, b, c]), stop_token_ids=[b], include_stop_str_in_output=True)
    assert output.text == "ab"


def test_output_that_has_ended_cannot_go_on():
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode("abc").ids
    for settings in ({"max_tokens": 3}, {"stop": ["bc"]}, {"stop_token_ids": token_ids[1:2]}):
        with pytest.raises(RequestError, match="ends the text") as error:
            new_sequence(tokenizer, SamplingParams(**settings), ()).resume(token_ids)
        assert error.value.param == "output_token_ids"


def ones():
    while True:
        yield 1


def random_cuts(seed):
    generator = random.Random(seed)
    while True:
        yield generator.randint(1, 6)


@pytest.mark.parametrize("name", ["fallback", "bundled", "bytes"])
@pytest.mark.parametrize("seed", range(3))
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
def test_rounds_and_moves_do_not_change_what_a_request_gets(name, seed, settings):
    tokenizer = tokenizers()[name]
    token_ids = tokenizer.encode(TEXT * 2).ids
    settings = dict(settings)
    stops = [token_ids[25]] if settings.pop("ids", False) else []
    params = SamplingParams(**{"max_tokens": len(token_ids), "stop_token_ids": stops, **settings})
    ends = [token_ids[33]] if not stops else []
    alone = committed(tokenizer, token_ids, ones(), params, ends)
    assert committed(tokenizer, token_ids, random_cuts(seed), params, ends) == alone
    assert committed(tokenizer, token_ids, random_cuts(seed), params, ends, moves=True) == alone
    assert alone[2] is not None
