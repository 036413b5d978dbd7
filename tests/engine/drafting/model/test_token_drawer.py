"""What draft tokens are drawn from, which passes draw them, and how chains grow by them."""

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.token_drawer import TOP_M, Chain
from engine.params import SamplingParams
from engine.protocols import Draft, Request
from engine.sampling.logits import Run, probabilities, shape
from tests.engine.drafting.proposing import propose, row
from tests.fakes import MarkovModel


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
