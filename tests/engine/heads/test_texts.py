"""With a head, the text is the target's own, whatever the head drafts: by the coupled rule token for token."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling.logits import Run, shape
from tests.engine.heads.cold_starts import CASES, KINDS
from tests.engine.heads.tiny_heads import backend_with_head
from tests.engine.running import SAMPLING, make_engine, run, run_outputs
from tests.engine.test_exactness import varied_requests
from tests.engine.test_features import Output
from tests.engine.test_features import requests as feature_requests
from tests.engine.tokenizers import json_tokenizer


def spoiled(backend, value):
    """A backend whose head's every logit is not a number, or infinite; so are its features."""
    with torch.no_grad():
        for name, parameter in backend.model.head.named_parameters():
            if name.startswith(("fc.", "eh_proj.")):
                parameter.fill_(value)
    return backend


HEADS = {
    "a head": lambda path, config: backend_with_head(path, config()),
    "another head": lambda path, config: backend_with_head(path, config(), seed=8),
    "few tokens": lambda path, config: backend_with_head(path, config(draft_vocab=9)),
    "not a number": lambda path, config: spoiled(backend_with_head(path, config()), float("nan")),
    "infinite": lambda path, config: spoiled(backend_with_head(path, config()), float("inf")),
}


@pytest.fixture(scope="module")
def backends(target_path):
    return {(name, kind): make(target_path, KINDS[kind]) for name, make in HEADS.items() for kind in KINDS}


@pytest.fixture(scope="module")
def requests():
    return varied_requests(4)


@pytest.fixture(scope="module")
def plain(target, requests):
    return run(make_engine(target, num_speculative_tokens=0), requests)


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"max_num_seqs": 8}], ids=["alone", "eight"])
def test_the_text_does_not_depend_on_the_head(settings, head, kind, method, backends, requests, plain):
    """Every sampling parameter is on somewhere, at temperatures 0, 0.7 and 1."""
    engine = make_engine(backends[head, kind], drafting=method, num_speculative_tokens=8, **settings)
    assert run(engine, requests) == plain
    is_tree_of_nothing = method == "head_tree" and head in ("not a number", "infinite")
    assert (engine.stats.num_draft_tokens == 0) == is_tree_of_nothing
    if head in ("a head", "another head"):
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.fixture(scope="module")
def start(target, backends, make_grammars):
    """Makes an engine with a head and a method, or without drafts."""

    def start(head=None, kind=None, method="none"):
        backend = target if head is None else backends[head, kind]
        settings = {"num_speculative_tokens": 8, "drafting": method}
        return make_engine(backend, tokenizer=json_tokenizer(), grammars=make_grammars(), **settings)

    return start


@pytest.fixture(scope="module")
def features():
    """Grammars, penalties, log probabilities and stop strings."""
    return feature_requests((0.0, 0.8))[::3]


@pytest.fixture(scope="module")
def plain_outputs(start, features):
    return [Output(rounds) for rounds in run_outputs(start(), features).values()]


@pytest.mark.parametrize(("kind", "method"), CASES)
@pytest.mark.parametrize("head", ["a head", "few tokens", "not a number"])
def test_what_a_client_sees_does_not_depend_on_the_head(head, kind, method, start, features, plain_outputs):
    rounds = run_outputs(start(head, kind, method), features)
    for actual, expected in zip(rounds.values(), plain_outputs, strict=True):
        Output(actual).check_equal(expected)


def test_a_draft_that_is_not_a_number_is_a_valid_chain(backends):
    """`check_drafts` and the wire refuse a token outside the vocabulary."""
    for kind in KINDS:
        engine = make_engine(backends["not a number", kind], drafting="head", num_speculative_tokens=3)
        params = SamplingParams(max_tokens=8, traces_rounds=True, seed=1)
        outputs = run_outputs(engine, [([3, 4, 5], params)])
        drafted = [token for rounds in outputs.values() for output in rounds for token in output.trace.draft_token_ids]
        assert drafted
        assert 0 <= min(drafted) <= max(drafted) < 64


# --- Law --------------------------------------------------------------------------------------------------------------

PROMPT = [31, 4, 15, 9, 26]
LENGTH = 3
LAW = SamplingParams(logit_bias=dict.fromkeys((2, 3, 4, 5), 60.0), max_tokens=LENGTH + 2, ignore_eos=True)
"""Four tokens are possible, so that a head without training drafts some that are accepted."""


def joint_law(backend):
    """The law of the first three tokens."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        rows = [ForwardRow([*PROMPT, *tokens], 0, [1 + i], 1) for i, tokens in enumerate(law)]
        logits = backend.run(build(rows, backend.allocate_kv(1 + len(rows), 16))).logits
        runs = [Run(Request("", [*PROMPT, *tokens], len(PROMPT), LAW), [0], [[]], ()) for tokens in law]
        probs = shape(logits.clone(), runs).softmax(-1)[:, 2:6].tolist()
        law = {
            (*tokens, token): weight * prob
            for (tokens, weight), row in zip(law.items(), probs, strict=True)
            for token, prob in enumerate(row, start=2)
        }
    return law


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["a head", "few tokens"])
@pytest.mark.parametrize("verification", METHODS["head"].rules)
def test_three_tokens_have_the_targets_joint_law(verification, head, kind, backends):
    """At 1e-5 each, a false alarm of the 6 tests of a kind has probability below 1e-4."""
    engine = make_engine(backends[head, kind], drafting="head", verification=verification, **SAMPLING)
    texts = run(engine, [(PROMPT, replace(LAW, seed=seed)) for seed in range(1000)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, joint_law(backends[head, kind])) > 1e-5
    assert 0.05 < engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens < 0.95
