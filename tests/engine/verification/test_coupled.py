"""The coupled rule by exact enumeration: every way the target's draws can fall, for every kind of draft."""

import itertools

import pytest
import torch

from engine.protocols import NO_DRAFT, Draft, chain
from engine.verification.coupled import walk
from tests.engine.laws import VOCAB, K, completed, joint, random_tables, total_variation
from tests.engine.verification.enumeration import context_of

CONTEXTS = [c for length in range(K + 1) for c in itertools.product(range(VOCAB), repeat=length)]


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


@pytest.mark.parametrize("draft", [*TREES.values(), chain([0, 0, 0]), chain([2, 1, 0])])
def test_a_draft_decides_how_far_a_round_gets_and_never_what_it_says(draft):
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        draws = dict(zip(CONTEXTS, torch.randint(VOCAB, (len(CONTEXTS),), generator=generator).tolist(), strict=True))
        alone = []
        for _ in range(K + 1):
            alone.append(draws[tuple(alone)])
        contexts = [context_of(draft, node) for node in range(-1, len(draft.token_ids))]
        tokens, path = walk(draft, [draws[context] for context in contexts])
        assert tokens == alone[: len(tokens)]
        assert [draft.token_ids[node] for node in path] == tokens[:-1]
        # It stopped because no child holds the token drawn, not earlier.
        last = path[-1] if path else -1
        children = [t for t, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == last]
        assert tokens[-1] not in children


def test_of_two_equal_siblings_the_first_is_taken():
    assert walk(Draft([4, 4], [-1, -1]), [4, 7, 8]) == ([4, 7], [0])
