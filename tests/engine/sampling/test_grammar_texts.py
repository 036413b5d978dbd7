"""Texts with a grammar: they match it, and no draft and no path changes them.

| mutant | caught by |
|---|---|
| mask: the draft's path is ignored, or no rollback after it | test_text_does_not_depend_on_the_draft |
| drafter: no grammar | test_a_target_that_drafts_for_itself_is_always_right |
| drafting=self: no grammar | test_text_does_not_depend_on_what_the_targets_first_layer_drafts |
| verifier: no grammar | test_text_does_not_depend_on_the_draft |
| engine: the matcher of an ended request is kept | test_nothing_is_kept_of_requests_that_ended |
"""

import itertools
import json
from dataclasses import replace

import jsonschema
import pytest
import torch

from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.drafting.run_ahead.trees import RunAheadTreeDrafter
from engine.errors import RequestError
from engine.llm import LLM
from engine.sampling import grammar as grammar_module
from engine.sampling.grammar import from_json_schema, from_regex
from engine.sampling.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.grammars import GRAMMARS, SCHEMA, matches
from tests.engine.running import make_engine, run
from tests.engine.tokenizers import END, json_tokenizer
from tests.fakes import ForgetfulDrafter, InterruptedDrafter, TreeDrafter


def requests(temperatures=(0.0, 0.7, 1.0)):
    generator = torch.Generator().manual_seed(3)
    batch = []
    for i, (name, temperature) in enumerate(itertools.product([*GRAMMARS] * 3, temperatures)):
        prompt = torch.randint(2, VOCAB, (3 + i % 20,), generator=generator).tolist()
        params = SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=120,
            grammar=GRAMMARS[name],
            num_speculative_tokens=1 + i % 8,
            repetition_penalty=1.3 if i % 4 == 0 else 1.0,
            top_k=5 if i % 5 == 0 else 0,
            top_p=0.9 if i % 3 == 0 else 1.0,
        )
        batch.append((prompt, params))
        if i % 4 == 1:  # a neighbour without a grammar
            batch.append((prompt, replace(params, grammar=None, max_tokens=10)))
    return batch


DRAFTERS = {
    "the target itself": lambda target, _, grammars: lambda config: ModelDrafter(target, config, grammars=grammars),
    "a random draft": lambda _, draft, grammars: lambda config: ModelDrafter(draft, config, grammars=grammars),
    "running ahead": lambda target, _, grammars: (
        lambda config: InterruptedDrafter(RunAheadDrafter(target, config, grammars=grammars))
    ),
    "trees": lambda *_: lambda _: TreeDrafter(range(1, VOCAB)),
    "trees that grow on": lambda target, _, grammars: (
        lambda config: InterruptedDrafter(RunAheadTreeDrafter(target, config, grammars=grammars))
    ),
    "forgetful": lambda target, _, grammars: (
        lambda config: ForgetfulDrafter(ModelDrafter(target, config, grammars=grammars))
    ),
}


@pytest.fixture(scope="module")
def plain(target, make_grammars):
    """The texts without speculation."""
    return run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), requests())


def test_texts_match_their_grammar(plain):
    tokenizer = json_tokenizer()
    ended = dict.fromkeys(GRAMMARS, 0)
    for tokens, (_, params) in zip(plain.values(), requests(), strict=True):
        if params.grammar is not None and tokens[-1] == END:
            name = next(name for name in GRAMMARS if GRAMMARS[name] == params.grammar)
            assert matches(name, tokenizer.decode(tokens[:-1])), tokenizer.decode(tokens)
            ended[name] += 1
    assert all(count >= 4 for count in ended.values()), ended


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_does_not_depend_on_the_draft(name, target, draft, make_grammars, plain):
    drafter = DRAFTERS[name](target, draft, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=8)
    assert run(engine, requests()) == plain
    assert engine.stats.num_accepted_tokens > 0


def test_text_does_not_depend_on_what_the_targets_first_layer_drafts(target, make_grammars, plain):
    settings = {"drafting": "self", "self_draft_layers": 1, "num_speculative_tokens": 8}
    engine = make_engine(target, grammars=make_grammars(), **settings)
    assert run(engine, requests()) == plain
    assert engine.stats.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def greedy(target, make_grammars):
    """Greedy requests, and their texts without speculation."""
    greedy = requests(temperatures=(0.0,))
    return greedy, run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), greedy)


@pytest.mark.parametrize("name", ["the target itself", "a random draft", "running ahead"])
def test_greedy_text_is_the_same_by_the_rejection_rule(name, target, draft, make_grammars, greedy):
    drafter = DRAFTERS[name](target, draft, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=8, verification="rejection")
    requests, plain = greedy
    assert run(engine, requests) == plain


def test_a_target_that_drafts_for_itself_is_always_right(target, make_grammars):
    drafter = DRAFTERS["the target itself"](target, None, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=4)
    run(engine, [one for one in requests() if one[1].grammar is not None])
    ended_inside_a_draft = 1 - engine.stats.acceptance_rate
    assert ended_inside_a_draft < 0.1


def test_text_survives_the_loss_of_every_matcher(target, make_grammars, plain):
    grammars = make_grammars()
    engine = make_engine(target, grammars=grammars, num_speculative_tokens=0)
    assert run(engine, requests(), between=lambda *_: grammars._matchers.clear()) == plain


def test_nothing_is_kept_of_requests_that_ended(target, make_grammars):
    ours, theirs = make_grammars(), make_grammars()
    engine = make_engine(
        target, DRAFTERS["running ahead"](target, None, theirs), grammars=ours, num_speculative_tokens=4
    )
    run(engine, requests())
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
