"""PredictionCopier: copies follow the prediction through edits, save passes, and never change the text or its law."""

import random
from dataclasses import replace
from functools import partial

import pytest

from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.predicted import PredictionCopier
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import METHODS
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.protocols import DeferringDrafter, NoDrafter, ProposeRow, Request
from engine.verification.rule import RULES
from tests.engine.drafting.proposing import context_model
from tests.engine.running import SAMPLING, expected_tokens, make_engine, run, run_outputs
from tests.engine.test_exactness import PROMPT, TARGET, UNLIKE, check_law
from tests.fakes import SelfDraftingModel

MODEL = context_model(3)
TEXT = SamplingParams(temperature=0.7, seed=5, max_tokens=1000, ignore_eos=True)


def engine_with(predicted, model=TARGET, drafting="none", **settings):
    """An engine whose requests all bring one prediction."""
    method = METHODS[drafting]
    made = {"router": None, "draft": DraftModel(UNLIKE, 5), "target": None}[method.runs_in]

    def drafter(config):
        return method.drafter_of_engine(config, method.make(config, made))

    engine = make_engine(model, drafter, **{"drafting": drafting, "num_speculative_tokens": 4} | settings)
    engine.add = partial(engine.add, predicted_token_ids=predicted)
    return engine


@pytest.fixture(scope="module")
def text():
    return run(make_engine(MODEL, num_blocks=100), [([2, 3, 4], TEXT)])["0"]


def edited(text, kind):
    """A text in which every twentieth token, on average, is replaced, missing, or has another one before it."""
    chance, changed = random.Random(0), []
    for token in text:
        other = [chance.randrange(2, 64)] if chance.random() < 0.05 else None
        changed += [token] if other is None else {"replaced": other, "missing": [], "more": [*other, token]}[kind]
    return changed


@pytest.mark.parametrize(("kind", "most"), [("replaced", 150), ("missing", 230), ("more", 190)])
def test_a_prediction_that_is_mostly_right_saves_three_quarters_of_the_passes(text, kind, most):
    """A thousand tokens, by a server that drafts four tokens a round at most, and here none."""
    engine = engine_with(edited(text, kind), MODEL, num_blocks=100, num_speculative_tokens=0)
    rounds = run_outputs(engine, [([2, 3, 4], TEXT)])["0"]
    assert [token for output in rounds for token in output.token_ids] == text
    assert len(rounds) <= most <= 250
    assert sum(output.num_predicted_tokens for output in rounds) == engine.stats.num_accepted_tokens > 700


@pytest.mark.parametrize("drafting", ["none", "tree", "self", "model+suffix"])
def test_a_right_prediction_saves_passes_of_the_requests_that_draft(drafting):
    model = SelfDraftingModel(TARGET.laws, UNLIKE.laws) if drafting == "self" else TARGET
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=60, ignore_eos=True)
    expected = expected_tokens(TARGET, PROMPT, params)
    engine = engine_with(expected, model, drafting, **({"self_draft_layers": 1} if drafting == "self" else {}))
    outputs = run_outputs(engine, [(PROMPT, params), (PROMPT, replace(params, num_speculative_tokens=0))])
    for rounds in outputs.values():
        assert [token for output in rounds for token in output.token_ids] == expected
    assert len(outputs["0"]) < 9
    assert not any(output.num_draft_tokens for output in outputs["1"]), "this request is plain decoding"


@pytest.mark.parametrize("verification", [name for name in RULES if name != "coupled"])
def test_predicted_drafts_have_the_targets_joint_law_by_every_rule(verification):
    engine = engine_with([0, 1, 2, 3, 4], **SAMPLING, verification=verification)
    check_law(engine)
    assert engine.stats.num_accepted_tokens > 0


def row(output, predicted, **params):
    request = Request("a", [9, *output], 1, SamplingParams(**params), predicted_token_ids=predicted)
    return ProposeRow(request, 4)


def copied(*outputs, **params):
    """The copy after each of some growing outputs, by one prediction."""
    copier, predicted = PredictionCopier(), list(range(100, 140))
    rows = [row(output, predicted, **params) for output in outputs]
    for one in rows:
        copier.read([one.request])
    return [copier.look_up(one).token_ids for one in rows]


def test_it_begins_at_the_start_and_finds_its_place_after_tokens_that_are_replaced_new_or_missing():
    starts = copied([], [100, 101, 7], [100, 101, 7, 103])
    assert starts == [list(range(100, 116)), [103, 104, 105, 106], list(range(104, 110))]
    assert copied([100, 7, 8, 101], [100, 7, 8, 101, 102])[-1] == [103, 104, 105, 106]
    assert copied([100, 120, 121])[-1] == [122, 123, 124, 125]
    assert copied([7, 8, 9], [7, 8, 9, 7])[-1] == []
    assert copied([*range(100, 140)], [*range(100, 140), 1])[-1] == []
    assert copied([100, 101, 7, 8, 9, *range(102, 120)]) == [list(range(120, 136))], "a resumed request"
    assert copied([], num_speculative_tokens=4) == [list(range(100, 104))]


def test_a_copy_yields_to_a_drafter_that_promises_more_and_others_are_left_alone():
    drafter = CombinedDrafter(DeferringDrafter(), PredictionCopier())
    rows = [row([], [100, 101]), replace(row([], []), request=Request("b", [9], 1, SamplingParams()))]
    assert drafter.plan_copies(rows, {"a": 1.0, "b": 4.0}) == {"a": 2}
    rows[0].num_draft_tokens = 9
    assert drafter.plan_copies(rows, {"a": 9.0, "b": 9.0}) == {}


def test_a_prediction_outside_the_vocabulary_is_refused():
    engine = make_engine(TARGET, lambda _: NoDrafter())
    with pytest.raises(RequestError, match="prediction contains token id 5; ids are 0 to 4"):
        engine.add("a", PROMPT, SamplingParams(), predicted_token_ids=[5])
