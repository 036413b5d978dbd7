"""What rules read out of drafts: coins that are independent, rows, residuals."""

import torch

from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain
from engine.sampling.logits import Run
from engine.verification.draft_rows import coins

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
