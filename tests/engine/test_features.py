"""Penalties, logprobs, grammars and stop strings under every drafter by the rejection rule.

Above temperature 0 a text is another draw from the target's law (test_exactness.py, test_grammar_law.py); it keeps to
its grammar, ends before its stop string, and has the target's own log probabilities. At 0, and by the coupled rule,
everything that a client sees is that of plain decoding (test_matrix.py).
"""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.grammars import GRAMMARS, matches
from tests.engine.running import SENDING_ROWS, drafters, make_engine, run_outputs
from tests.engine.tokenizers import END, json_tokenizer

STOPS = [letter + digit for letter in "abcdefgh" for digit in "0123456789"] + ["{", "q", "null"]
FEATURES = {
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.6, logprobs=0),
    "logprobs": SamplingParams(logprobs=3),
    "grammar": SamplingParams(grammar=GRAMMARS["json"], logprobs=2),
    "stop strings": SamplingParams(stop=STOPS, logprobs=1),
    "stop strings, kept": SamplingParams(stop=STOPS, include_stop_str_in_output=True, min_tokens=3),
}


def requests(temperatures):
    """Every feature at every temperature, over several prompts and draft lengths, and grammars of every notation."""
    generator = torch.Generator().manual_seed(8)
    batch = []
    for i, (params, temperature, nth) in enumerate(itertools.product(FEATURES.values(), temperatures, range(5))):
        prompt = torch.randint(2, VOCAB, (2 + i % 13,), generator=generator).tolist()
        params = replace(params, temperature=temperature, seed=i, num_speculative_tokens=2 + i % 7)
        if params.grammar is None:
            params = replace(params, max_tokens=18, ignore_eos=True)
        else:
            params = replace(params, max_tokens=120, grammar=[*GRAMMARS.values()][nth])
        batch.append((prompt, params))
    return batch


@pytest.fixture(scope="module")
def start(target, draft, make_grammars):
    """Makes an engine with a drafter and a rule."""
    tokenizer = json_tokenizer()

    def start(name=None, verification="coupled"):
        settings = {"num_speculative_tokens": 0 if name is None else 8, "verification": verification}
        drafter = drafters(target, draft, make_grammars(), tokens=range(1, VOCAB)).get(name)
        return make_engine(target, drafter, tokenizer=tokenizer, grammars=make_grammars(), **settings)

    return start


@pytest.fixture(scope="module")
def generate(start):
    """Runs requests with a drafter and a rule: per request its tokens, text, reasons and log probabilities."""

    def generate(batch, name=None, verification="coupled"):
        engine = start(name, verification)
        rounds_by_request = run_outputs(engine, batch)
        assert name is None or engine.stats.num_draft_tokens > 0
        return [Output(rounds) for rounds in rounds_by_request.values()]

    return generate


class Output:
    """All rounds of one request, put together."""

    def __init__(self, rounds):
        self.token_ids = [token for output in rounds for token in output.token_ids]
        self.text = "".join(output.text for output in rounds)
        self.reasons = rounds[-1].finish_reason, rounds[-1].stop_reason
        self.logprobs = [entry for output in rounds for entry in output.logprobs or []]

    def check_equal(self, other):
        assert (self.token_ids, self.text, self.reasons) == (other.token_ids, other.text, other.reasons)
        check_logprobs(self.logprobs, other.logprobs)


def check_logprobs(actual, expected):
    assert len(actual) == len(expected)
    for entry, other in zip(actual, expected, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
        assert entry.top_ids == other.top_ids
        assert abs(entry.rank - other.rank) <= 1  # of two that are as likely, either may come first


@pytest.fixture(scope="module")
def drawn(generate):
    """The outputs by the rejection rule at temperature 0.8, by drafter."""
    return {name: generate(requests((0.8,)), name, "rejection") for name in SENDING_ROWS}


def with_feature(name, outputs, temperatures=(0.8,)):
    """Pairs of a request and its output, of one feature."""
    batch = requests(temperatures)
    size = len(batch) // len(FEATURES)
    first = [*FEATURES].index(name) * size
    return list(zip(batch, outputs, strict=True))[first : first + size]


@pytest.mark.parametrize("name", SENDING_ROWS)
def test_drawn_texts_match_their_grammar(name, drawn):
    actual = zip(GRAMMARS, with_feature("grammar", drawn[name]), strict=True)
    complete = {grammar: output.text for grammar, (_, output) in actual if output.token_ids[-1] == END}
    assert len(complete) >= 4
    assert all(matches(grammar, text) for grammar, text in complete.items())


@pytest.mark.parametrize("name", SENDING_ROWS)
def test_drawn_texts_end_before_their_stop_string(name, drawn):
    actual = [output for _, output in with_feature("stop strings", drawn[name])]
    assert sum(output.reasons[0] == "stop" for output in actual) >= 2
    for output in actual:
        assert not any(stop in output.text for stop in STOPS)
        whole = json_tokenizer().decode(output.token_ids)
        assert (output.reasons[0] == "stop") == any(stop in whole for stop in STOPS)


@pytest.mark.parametrize("name", SENDING_ROWS)
def test_logprobs_are_the_targets_own(name, drawn, generate, target):
    """Each text is given to the target again, as a prompt."""
    pairs = [pair for feature in ("logprobs", "penalties", "grammar") for pair in with_feature(feature, drawn[name])]
    engine = make_engine(target, num_speculative_tokens=0)
    again = [
        ([*prompt, *output.token_ids], SamplingParams(prompt_logprobs=params.logprobs, max_tokens=1))
        for (prompt, params), output in pairs
    ]
    rounds = run_outputs(engine, again).values()
    for ((prompt, _), output), (first, *_) in zip(pairs, rounds, strict=True):
        check_logprobs(output.logprobs, first.prompt_logprobs[len(prompt) - 1 :])
