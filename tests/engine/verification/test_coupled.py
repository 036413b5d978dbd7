"""The coupled rule by exact enumeration: every way the target's draws can fall, for every kind of draft."""

import itertools

import pytest
import torch

from engine.protocols import NO_DRAFT, Draft, chain
from engine.verification.coupled import walk
from tests.engine.laws import VOCAB, K, completed, joint, random_tables, total_variation
from tests.engine.verification.enumeration import context_of


def emitted_law(target, draft):
    """The joint law of K + 1 tokens: a round whose draws are enumerated, then the target alone.

    Draws after equal contexts are one draw: the noise knows the position and the token, not the node.
    """
    contexts = [context_of(draft, node) for node in range(-1, len(draft.token_ids))]
    distinct = sorted(set(contexts))
    heads = []
    for draws in itertools.product(range(VOCAB), repeat=len(distinct)):
        drawn = dict(zip(distinct, draws, strict=True))
        weight = float(torch.stack([target[c][token] for c, token in drawn.items()]).prod())
        head, path = walk(draft, [drawn[context] for context in contexts])
        assert len(head) == len(path) + 1
        heads.append((tuple(head), weight))
    return completed(heads, target)


TREES = {
    "empty": NO_DRAFT,
    "siblings": Draft([0, 1, 2], [-1, -1, -1]),
    "equal siblings": Draft([1, 1, 0, 2], [-1, -1, 0, 1]),
    "two paths": Draft([0, 1, 2, 2, 0], [-1, -1, 0, 1, 3]),
    "deep second path": Draft([0, 1, 1, 2], [-1, -1, 1, 2]),
}


@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
def test_the_joint_law_is_the_targets_for_every_chain(zeros):
    target = random_tables(1, zeros=zeros)
    for tokens in itertools.product(range(VOCAB), repeat=K):
        assert total_variation(emitted_law(target, chain(list(tokens))), joint(target)) < 1e-12


@pytest.mark.parametrize("name", TREES)
def test_the_joint_law_is_the_targets_for_trees(name):
    target = random_tables(2)
    assert total_variation(emitted_law(target, TREES[name]), joint(target)) < 1e-12
