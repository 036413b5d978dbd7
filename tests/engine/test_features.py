"""Penalties, logprobs, grammars and stop strings under every drafter and both rules.

By the coupled rule everything that a client sees equals what it sees without speculation. By the rejection rule that
holds at temperature 0; above it the text is another draw from the same law (test_exactness.py, test_grammar_law.py),
which keeps to its grammar, ends before its stop string, and has the target's own log probabilities.

| mutant | caught by |
|---|---|
| logits: penalties ignore the draft's path | test_coupled_output_..., test_greedy_output_... |
| verifier: logprobs of the shaped logits | test_logprobs_are_the_targets_own |
| verifier: logprobs of another row than the token's own | test_coupled_output_... |
| sequence: logprobs of tokens after the end are kept | test_coupled_output_... |
| sequence: tokens after the end are kept | test_coupled_output_... |
| grammar: the draft's path is ignored | test_coupled_output_... |
| verifier: no grammar | test_drawn_texts_match_their_grammar |
| detokenizer: a stop string that began in an earlier round is missed | test_drawn_texts_end_before_their_stop_string |
| engine: the earlier output is taken for a part of the prompt | test_a_text_goes_on_in_another_engine_as_if_... |
| sequence: the earlier output is not shown to the detokenizer | test_a_text_goes_on_in_another_engine_as_if_... |
"""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.drafting.model import ModelDrafter
from engine.drafting.registry import METHODS, DraftModel
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.drafting.run_ahead.trees import RunAheadTreeDrafter
from engine.sampling.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.grammars import GRAMMARS, matches
from tests.engine.running import make_engine, run_outputs
from tests.engine.tokenizers import END, json_tokenizer
from tests.fakes import ConstantDrafter, ForgetfulDrafter, InterruptedDrafter, TreeDrafter

STOPS = [letter + digit for letter in "abcdefgh" for digit in "0123456789"] + ["{", "q", "null"]
FEATURES = {
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.6, logprobs=0),
    "logprobs": SamplingParams(logprobs=3),
    "grammar": SamplingParams(grammar=GRAMMARS["regex"], logprobs=2),
    "stop strings": SamplingParams(stop=STOPS, logprobs=1),
    "stop strings, kept": SamplingParams(stop=STOPS, include_stop_str_in_output=True, min_tokens=3),
}
DRAFTERS = {
    "the target itself": lambda target, _, grammars: lambda config: ModelDrafter(target, config, grammars=grammars),
    "a random draft": lambda _, draft, grammars: lambda config: ModelDrafter(draft, config, grammars=grammars),
    "running ahead": lambda target, _, grammars: (
        lambda config: InterruptedDrafter(RunAheadDrafter(target, config, grammars=grammars))
    ),
    "forgetful": lambda target, _, grammars: (
        lambda config: ForgetfulDrafter(ModelDrafter(target, config, grammars=grammars))
    ),
    "a tree": lambda target, _, grammars: (
        lambda config: METHODS["tree"].make(config, DraftModel(target, VOCAB, grammars))
    ),
    "a tree by a random draft": lambda _, draft, grammars: (
        lambda config: METHODS["tree"].make(config, DraftModel(draft, VOCAB, grammars))
    ),
}
TREES = {
    "always wrong": lambda *_: lambda _: ConstantDrafter(0),
    "trees": lambda *_: lambda _: TreeDrafter(range(1, VOCAB)),
    "a tree that grows on": lambda target, _, grammars: (
        lambda config: InterruptedDrafter(RunAheadTreeDrafter(target, config, grammars=grammars))
    ),
}
"""Drafts without probabilities, which the rejection rule has no use for."""


def requests(temperatures):
    """Every feature at every temperature, over several prompts and draft lengths."""
    generator = torch.Generator().manual_seed(8)
    batch = []
    for i, (params, temperature, _) in enumerate(itertools.product(FEATURES.values(), temperatures, range(4))):
        prompt = torch.randint(2, VOCAB, (2 + i % 13,), generator=generator).tolist()
        ignore_eos = params.grammar is None
        sampling = replace(params, temperature=temperature, seed=i, max_tokens=18, ignore_eos=ignore_eos)
        batch.append((prompt, replace(sampling, num_speculative_tokens=2 + i % 7)))
    return batch


@pytest.fixture(scope="module")
def start(target, draft, make_grammars):
    """Makes an engine with a drafter and a rule."""
    tokenizer = json_tokenizer()

    def start(name=None, verification="coupled"):
        drafter = None if name is None else (DRAFTERS | TREES)[name](target, draft, make_grammars())
        return make_engine(
            target,
            drafter,
            tokenizer=tokenizer,
            grammars=make_grammars(),
            verification=verification,
            num_speculative_tokens=0 if name is None else 8,
        )

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
def plain(generate):
    """The outputs without speculation."""
    return generate(requests((0.0, 0.8)))


@pytest.fixture(scope="module")
def drawn(generate):
    """The outputs by the rejection rule at temperature 0.8, by drafter."""
    return {name: generate(requests((0.8,)), name, "rejection") for name in DRAFTERS}


@pytest.mark.parametrize("name", [*DRAFTERS, *TREES])
def test_coupled_output_is_that_without_speculation(name, generate, plain):
    for actual, expected in zip(generate(requests((0.0, 0.8)), name), plain, strict=True):
        actual.check_equal(expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("name", [None, "a random draft", "running ahead"])
def test_a_text_goes_on_in_another_engine_as_if_it_had_not_been_cut(name, share, start, plain):
    """The first engine sends a share of each text's rounds; the second one gets their tokens."""
    batch = requests((0.0, 0.8))
    first, cut_after = start(name), [round(share * (len(output.token_ids) - 1)) for output in plain]
    rounds = run_outputs(first, batch)
    second, cut = start(name), {}
    for (request_id, outputs), (prompt, params), num_tokens in zip(rounds.items(), batch, cut_after, strict=True):
        lengths = itertools.accumulate(len(output.token_ids) for output in outputs)
        kept = [output for output, length in zip(outputs, lengths, strict=True) if length <= num_tokens]
        cut[request_id] = kept
        token_ids = [token for output in kept for token in output.token_ids]
        second.add(request_id, prompt, params, output_token_ids=token_ids)
    rest = run_outputs(second, [])
    for expected, (request_id, kept) in zip(plain, cut.items(), strict=True):
        Output([*kept, *rest[request_id]]).check_equal(expected)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_by_the_rejection_rule_is_that_without_speculation(name, generate):
    greedy = requests((0.0,))
    for actual, expected in zip(generate(greedy, name, "rejection"), generate(greedy), strict=True):
        actual.check_equal(expected)


def with_feature(name, outputs, temperatures=(0.8,)):
    """Pairs of a request and its output, of one feature."""
    batch = requests(temperatures)
    size = len(batch) // len(FEATURES)
    first = [*FEATURES].index(name) * size
    return list(zip(batch, outputs, strict=True))[first : first + size]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drawn_texts_match_their_grammar(name, drawn):
    actual = [output for _, output in with_feature("grammar", drawn[name])]
    complete = [output for output in actual if output.token_ids[-1] == END]
    assert len(complete) >= 2
    assert all(matches("regex", output.text) for output in complete)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drawn_texts_end_before_their_stop_string(name, drawn):
    actual = [output for _, output in with_feature("stop strings", drawn[name])]
    assert sum(output.reasons[0] == "stop" for output in actual) >= 2
    for output in actual:
        assert not any(stop in output.text for stop in STOPS)
        whole = json_tokenizer().decode(output.token_ids)
        assert (output.reasons[0] == "stop") == any(stop in whole for stop in STOPS)


@pytest.mark.parametrize("name", DRAFTERS)
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


def test_some_texts_end_early(plain):
    """Else nothing above would have seen an end inside a round."""
    for name in ("grammar", "stop strings", "stop strings, kept"):
        outputs = [output for _, output in with_feature(name, plain, (0.0, 0.8))]
        assert sum(output.reasons[0] == "stop" for output in outputs) >= 4, name
