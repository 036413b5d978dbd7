"""A target that drafts for itself: the text and its law are the target's own, whatever its first layers draft."""

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, chain, run_in_process
from tests.engine.heads.tiny_heads import make_verifier, prefill, verify_row
from tests.engine.running import SAMPLING, expected_tokens, make_engine
from tests.engine.test_exactness import check_law
from tests.fakes import SelfDraftingModel

SELF = {"drafting": "self", "self_draft_layers": 1}


def laws(seed, states=9, vocab=5):
    return torch.randn(states, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def model_of(thinned_seed):
    """The target of `test_exactness`, whose first layer has its own laws (seed 1) or others."""
    return SelfDraftingModel(laws(1), laws(thinned_seed))


# --- Law --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "thinned_seed"),
    [("plain", 1), ("penalties", 2)],
    ids=["like", "unlike, penalties"],
)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_three_tokens_have_the_targets_joint_law(verification, name, thinned_seed):
    engine = make_engine(model_of(thinned_seed), **SELF, **SAMPLING, verification=verification)
    check_law(engine, name, 1000)
    if thinned_seed == 1:
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    else:
        assert 0 < engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens


# --- Passes -----------------------------------------------------------------------------------------------------------


def test_the_draft_comes_back_with_the_verdict_and_costs_one_pass_a_token():
    model = model_of(2)
    verifier = make_verifier(model, **SELF)
    rows = [
        prefill(verifier, verify_row([1, 2, 3, 4], 3)),
        prefill(verifier, verify_row([4, 2, 1], 0, first_block=20)),
        prefill(verifier, verify_row([0, 0, 3], 5, first_block=40)),
    ]
    verdicts = run_in_process(verifier.verify(rows))
    assert model.thinned.num_passes == 5
    expected = [expected_tokens(model.thinned, row.request.token_ids, greedy(5)) for row in rows]
    assert [verdict.draft for verdict in verdicts] == [chain(expected[0][:3]), NO_DRAFT, chain(expected[2])]
    for row, verdict in zip(rows, verdicts, strict=True):
        tokens = row.request.token_ids
        assert verdict.token_ids == expected_tokens(model, tokens, greedy(len(verdict.token_ids)))


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
