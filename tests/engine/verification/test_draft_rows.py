"""What rules read out of drafts: coins that are independent, rows, residuals."""

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain
from engine.sampling.logits import Run
from engine.verification.draft_rows import coins, draft_prob, draft_row, first_rows, residual

TREE = Draft([5, 6, 7, 8, 9], [-1, -1, 0, 1, 3])


def toss(draft, tokens):
    run = Run(Request("a", tokens, 1, SamplingParams(seed=3)), [0])
    return coins([run], [draft], torch.device("cpu")).tolist()


def test_coins_of_one_round_are_independent():
    """Siblings have their own, and so have nodes of one depth with other parents."""
    assert len(set(toss(TREE, [1, 2, 3]))) == 5


def test_the_next_round_tosses_anew_and_a_repeated_one_does_not():
    assert toss(TREE, [1, 2, 3]) == toss(TREE, [1, 2, 3])
    # The second token of the first round stands where the first one of the second round does.
    assert toss(chain([5, 6]), [1, 2, 3])[1] != toss(chain([6]), [1, 2, 3, 5])[0]


def test_rows_follow_their_tip():
    assert first_rows([chain([1, 2]), Draft(), TREE]) == [0, 3, 4]


def test_a_token_without_a_row_was_certain():
    assert draft_row(chain([4]), 0) == ([4], [1.0])
    assert draft_prob(Draft([4], [-1], [[3, 4]], [[0.25, 0.75]]), 0) == 0.75


def test_a_residual_is_never_negative():
    weights = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    left = residual(weights, [(0, 0, 0.7), (1, 1, 0.4)])
    assert left.flatten().tolist() == pytest.approx([0.0, 0.5, 0.1, 0.5])
