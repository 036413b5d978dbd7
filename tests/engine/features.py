"""Requests for penalties, log probabilities, grammars and stop strings, and what a client gets of a request."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.grammars import GRAMMARS

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


class Output:
    """All rounds of one request, put together."""

    def __init__(self, rounds):
        self.token_ids = [token for output in rounds for token in output.token_ids]
        self.text = "".join(output.text for output in rounds)
        self.reasons = rounds[-1].finish_reason, rounds[-1].stop_reason
        self.logprobs = [entry for output in rounds for entry in output.logprobs or []]
        self.differences = [entry for output in rounds for entry in output.differences]

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
