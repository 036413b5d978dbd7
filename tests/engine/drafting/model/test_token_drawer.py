"""What draft tokens are drawn from, which passes draw them, and how chains grow by them."""

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.token_drawer import TOP_M, Chain
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.params import SamplingParams
from engine.protocols import Draft, Request
from engine.sampling.logits import Run, probabilities, shape
from tests.engine.drafting.model.test_tree_drafter import PARAMS, scores_after
from tests.engine.drafting.proposing import context_model, finish, propose, row
from tests.fakes import ContextModel, MarkovModel


def test_rows_of_the_rejection_rule_are_what_the_tokens_were_sampled_from():
    """At most TOP_M entries that sum to 1: the model's own probabilities, cut to its likeliest tokens."""
    torch.manual_seed(0)
    model = MarkovModel(torch.rand(50, 50).softmax(-1))
    drafter = ModelDrafter(DraftModel(model), EngineConfig(num_blocks=50, verification="rejection"))
    params = SamplingParams(temperature=0.7, seed=5, top_k=40)
    (found,) = propose(drafter, row([4, 5, 6], 3, params=params))
    context = [4, 5, 6]
    for token, ids, probs in zip(found.token_ids, found.top_ids, found.top_probs, strict=True):
        run = Run(Request("a", context, 3, params), [0])
        law = probabilities(shape(model.transitions[context[-1:]].log(), [run]), [run])[0]
        assert len(ids) == len(set(ids)) == TOP_M
        assert token in ids
        assert sum(probs) == pytest.approx(1)
        assert probs == pytest.approx((law[ids] / law[ids].sum()).tolist(), abs=1e-6)
        context.append(token)


def test_a_greedy_draft_is_certain_of_its_tokens():
    model = MarkovModel(torch.rand(8, 8, generator=torch.Generator().manual_seed(1)).softmax(-1))
    drafter = ModelDrafter(DraftModel(model), EngineConfig(num_blocks=50, verification="rejection"))
    (found,) = propose(drafter, row([4, 5, 6], 3))
    for token, ids, probs in zip(found.token_ids, found.top_ids, found.top_probs, strict=True):
        assert dict(zip(ids, probs, strict=True)) == {i: float(i == token) for i in range(8)}


def test_a_draft_is_no_part_of_its_chain():
    """The draft is sent while the chain may still be cut."""
    chain = Chain([1, 2])
    draft = chain.draft()
    chain.cut(0)
    assert draft == Draft([1, 2], [-1, 0])


MODEL = context_model(1, sharpness=2)


@pytest.mark.parametrize("make", [ModelDrafter, RunAheadDrafter])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_token_is_as_sure_as_its_score_is_ahead_of_the_second_best(params, make):
    """Wherever it was drawn: late, or ahead for a verdict that came."""
    drafter = make(DraftModel(MODEL), EngineConfig(num_blocks=100))
    text = [5, 9, 4]
    for _ in range(6):
        (draft,) = propose(drafter, row(text, params=params))
        assert len(draft.confidences) == len(draft.token_ids) > 0
        for i, (token, confidence) in enumerate(zip(draft.token_ids, draft.confidences, strict=True)):
            (best, second), ids = scores_after(MODEL, text, draft.token_ids[:i], params).topk(2)
            assert token == ids[0]
            expected = torch.sigmoid(3 * (best - second)).clamp(0.001, 0.999)
            assert confidence == pytest.approx(float(expected), abs=1e-4)
        if make is RunAheadDrafter:
            finish(drafter)
        text += draft.token_ids
        text.append(int(scores_after(MODEL, text, [], params).argmax()))
    assert make is ModelDrafter or drafter.stats.hits == 5


@pytest.mark.parametrize("make", [ModelDrafter, RunAheadDrafter])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_drafts_are_the_same_without_confidences(params, make):
    rows = [row([5, 9, 4 + i], 5, name=str(i), params=params) for i in range(5)]
    drafts = [
        propose(make(DraftModel(MODEL), EngineConfig(num_blocks=100, speculation=speculation)), *rows)
        for speculation in ("adaptive", "fixed")
    ]
    assert drafts[0] == drafts[1]
    assert {draft.confidences is None for draft in drafts[1]} == {True}


def test_without_shared_noise_there_are_no_confidences():
    config = EngineConfig(num_blocks=50, verification="rejection")
    assert propose(ModelDrafter(DraftModel(MODEL), config), row([5, 9, 4]))[0].confidences is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_surer_a_token_is_the_more_often_it_is_accepted(temperature):
    """By a target that is much like the draft, after a draft whose tokens before were accepted."""
    other = context_model(2, sharpness=2).laws.log()
    target = ContextModel((MODEL.laws.log() + 0.5 * other).softmax(-1), [1])
    drafter = ModelDrafter(DraftModel(MODEL), EngineConfig(num_blocks=4000, max_num_seqs=512))
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(300)]
    rows = [row([2 + i % 60, 2 + i // 60, 9], 6, name=str(i), params=one) for i, one in enumerate(params)]
    pairs = []
    for one, draft in zip(rows, propose(drafter, *rows), strict=True):
        for i, (token, confidence) in enumerate(zip(draft.token_ids, draft.confidences, strict=True)):
            scores = scores_after(target, one.request.token_ids, draft.token_ids[:i], one.request.params)
            pairs.append((confidence, int(scores.argmax()) == token))
            if not pairs[-1][1]:
                break
    pairs.sort()
    size = len(pairs) // 4
    rates = [sum(accepted for _, accepted in pairs[i * size : (i + 1) * size]) / size for i in range(4)]
    assert rates == sorted(rates)
    assert rates[3] > rates[0] + 0.25
