"""Masks: what may follow a text and a draft; and what is no grammar."""

import itertools
import json
from dataclasses import replace

import jsonschema
import pytest
import torch

from engine.errors import RequestError
from engine.llm import LLM
from engine.params import SamplingParams
from engine.sampling import grammar as grammar_module
from engine.sampling.grammar_text import from_json_schema, from_regex, from_text
from engine.sampling.logits import forbid
from tests.engine.conftest import VOCAB
from tests.engine.features import requests
from tests.engine.grammars import GRAMMARS, SCHEMA
from tests.engine.running import chains, drafters, make_engine, run, run_outputs
from tests.engine.tokenizers import END, json_tokenizer


def allowed(grammars, grammar, tokens):
    """The tokens after `tokens`, by a matcher that saw nothing else."""
    matcher = grammars.compile(grammar)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    mask = matcher.compute_bitmask()
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}


def masked(matcher, output, paths):
    logits = torch.zeros(len(paths), VOCAB)
    forbid(logits, matcher.masks(output, paths))
    return [{token for token in range(VOCAB) if row[token] == 0} for row in logits]


def random_walk(grammars, grammar, length, generator):
    """Tokens that the grammar allows one after the other; the end is left out."""
    tokens = []
    while len(tokens) < length and (choices := sorted(allowed(grammars, grammar, tokens) - {END})):
        tokens.append(choices[int(torch.randint(len(choices), (1,), generator=generator))])
    return tokens


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_is_that_of_a_fresh_matcher(name, make_grammars):
    """After every path, allowed or not, in any order of requests, and when committed tokens are taken back."""
    generator = torch.Generator().manual_seed(0)
    grammars, grammar = make_grammars(), GRAMMARS[name]
    matcher = grammars.matcher("a", grammar)
    for _ in range(20):
        text = random_walk(grammars, grammar, 12, generator)
        other = random_walk(grammars, grammar, 12, generator)
        for tip in range(len(text) + 1):
            tails = [text[tip : tip + length] for length in range(4)]
            if other[:tip] == text[:tip]:
                tails += [other[tip : tip + length] for length in range(4)]
            rows = masked(matcher, text[:tip], tails)
            assert rows == [allowed(grammars, grammar, text[:tip] + tail) for tail in tails]


def test_a_row_without_any_allowed_token_stays_as_it_is(make_grammars):
    matcher = make_grammars().matcher("a", from_regex("a"))
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 0] = 0.0
    forbid(logits, matcher.masks([], [[]]))
    assert logits[0, 0] == 0.0


AMBIGUOUS = from_text('start: start start start | "a" | "b" | start "c"?')


@pytest.mark.parametrize(
    ("limit", "why"), [({"step_max_items": 150}, "Too many items"), ({}, "its masks take too long")]
)
def test_a_grammar_that_gets_too_complex_ends_its_request_with_an_error_and_no_other(
    limit, why, target, make_grammars, monkeypatch
):
    """Either mutant dies here: a matcher that forgets what its masks took, or that says only that the text ends."""
    for name, value in limit.items():
        monkeypatch.setitem(grammar_module.LIMITS, name, value)
    if not limit:  # as if each mask took two milliseconds
        ticks = itertools.count()
        monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(ticks) * 2e-3)
    grammars = make_grammars()
    params = SamplingParams(max_tokens=120, temperature=0)
    hostile, harmless = replace(params, grammar=AMBIGUOUS, logit_bias={END: -100}), replace(params, ignore_eos=True)
    engine = make_engine(target, chains(target, make_grammars()), grammars=grammars, num_speculative_tokens=2)
    outputs = run_outputs(engine, [([3, 4], hostile), ([3, 4], harmless)])
    last = outputs["0"][-1]
    assert (last.finish_reason, last.token_ids) == ("error", [])
    assert why in last.stop_reason
    assert 1 < sum(len(output.token_ids) for output in outputs["0"]) < 120
    assert [token for output in outputs["1"] for token in output.token_ids] == run(
        make_engine(target), [([3, 4], harmless)]
    )["0"]


def test_nothing_is_kept_of_requests_that_ended(target, make_grammars):
    ours, theirs = make_grammars(), make_grammars()
    drafter = drafters(target, None, theirs)["running ahead"]
    run(make_engine(target, drafter, tokenizer=json_tokenizer(), grammars=ours), requests((0.8,)))
    assert not ours._matchers
    assert not theirs._matchers
    assert len(ours._compiled) <= grammar_module.NUM_COMPILED


def test_the_bundled_pair_writes_json():
    llm = LLM(dtype="float32", device="cpu", compile="off")
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=200, grammar=from_json_schema(SCHEMA))
    (result,) = llm.generate(["The answer is "], params)
    output = result.outputs[0]
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), SCHEMA)
    assert output.stats.num_accepted_tokens > 0
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(["x"], SamplingParams(grammar=from_regex("(a")))
