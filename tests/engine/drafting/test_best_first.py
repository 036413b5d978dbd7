"""The best tree of n nodes, by the probabilities of its candidates."""

import itertools
import random

import pytest

from engine.drafting.best_first import BestFirstTree
from engine.drafting.nodes import TIP
from engine.drafting.run_ahead.verdicts import Options


def grow(num_nodes, law, *, num_places=None, end_ids=()):
    """Grow a tree whose nodes have the children `law(path)`: {token: probability}, the likeliest first."""
    tree, level = BestFirstTree(num_nodes, num_places or 4 * num_nodes, end_ids), [TIP]
    while level:
        for node in level:
            children = law(tuple(tree.nodes[step].token_id for step in tree.path(node)))
            tree.add(node, Options(list(children), [0.0] * len(children)), list(children.values()))
        level = tree.next_level()
    return tree


def total(law, nodes):
    """The expected number of accepted tokens of the tree that has these paths."""
    return sum(probability(law, path) for path in nodes)


def probability(law, path):
    reached = 1.0
    for i, token in enumerate(path):
        reached *= law(path[:i]).get(token, 0.0)
    return reached


def paths_of(draft):
    paths = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def random_law(seed):
    def law(path):
        chance = random.Random(f"{seed} {path}")
        weights = sorted((chance.random() ** 3 for _ in range(3)), reverse=True)
        return {token: weight / sum(weights) * 0.95 for token, weight in enumerate(weights)}

    return law


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
def test_no_tree_of_as_many_nodes_has_more_accepted_tokens_in_expectation(num_nodes):
    for seed in range(10):
        law = random_law(seed)
        paths = paths_of(grow(num_nodes, law).draft())
        assert len(set(paths)) == num_nodes
        every = [path for depth in range(1, num_nodes + 1) for path in itertools.product(range(3), repeat=depth)]
        best = sorted((probability(law, path) for path in every), reverse=True)[:num_nodes]
        assert total(law, paths) == pytest.approx(sum(best))


def test_the_first_nodes_are_the_best_smaller_tree():
    law = random_law(3)
    whole = grow(8, law).draft()
    for count in range(1, 8):
        smaller = grow(count, law).draft()
        assert (whole.token_ids[:count], whole.parents[:count]) == (smaller.token_ids, smaller.parents)


def test_a_sure_draft_is_a_chain_and_an_unsure_one_has_siblings():
    assert grow(4, lambda _: {0: 0.99, 1: 0.01}).draft().is_chain
    assert grow(3, lambda _: {0: 0.4, 1: 0.3, 2: 0.3}).draft().parents == [-1, -1, -1]


@pytest.mark.parametrize("num_nodes", [16, 32])
def test_a_nearly_sure_draft_is_deep_although_it_has_siblings(num_nodes):
    """Each level has unlikely nodes that could be computed; they must not use up the places of later levels."""

    def law(path):
        return {0: 0.9, 1: 0.06, 2: 0.04} if len(path) % 4 == 3 else {0: 0.98, 1: 0.015, 2: 0.005}

    paths = paths_of(grow(num_nodes, law, num_places=3 * num_nodes).draft())
    every = [(*[0] * depth, token) for depth in range(num_nodes) for token in range(3)]
    best = sorted((probability(law, path) for path in every), reverse=True)[:num_nodes]
    assert total(law, paths) == pytest.approx(sum(best))


def test_no_more_levels_are_computed_than_can_matter():
    """What follows the last node of a chain cannot."""
    passes = []

    def law(path):
        passes.append(path)
        return {0: 0.9, 1: 0.1}

    grow(4, law)
    assert set(passes) == {(), (0,), (1,), (0, 0), (0, 0, 0)}


def test_nothing_is_drafted_after_the_end_of_the_text():
    draft = grow(6, lambda _: {7: 0.9, 1: 0.1}, end_ids={7}).draft()
    assert [token for token, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == 0] == []
    assert draft.token_ids[0] == 7


def test_no_more_nodes_are_computed_than_there_are_places():
    for seed in range(30):
        for num_nodes in (1, 2, 3, 8, 16):
            tree = grow(num_nodes, random_law(seed), num_places=num_nodes)
            assert tree.num_computed <= num_nodes
            assert len(tree.draft().token_ids) == num_nodes


def test_a_node_after_which_nothing_is_possible_has_no_children():
    draft = grow(3, lambda path: {} if path else {4: 1.0}).draft()
    assert (draft.token_ids, draft.parents) == ([4], [-1])
