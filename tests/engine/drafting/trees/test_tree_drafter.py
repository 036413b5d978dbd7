"""The tree drafter: the best tree of n nodes, by the probabilities of its candidates and by shared noise."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import NextTokens
from engine.drafting.trees.levelwise import TIP
from engine.drafting.trees.tree_drafter import BestFirstTree, TreeDrafter
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import PARAMS, Counting, check, context_model, propose, row
from tests.fakes import ContextModel

CONFIG = EngineConfig(num_blocks=1000, block_size=4, max_num_batched_tokens=24, drafting="tree")


MODEL = context_model(1, sharpness=2)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("num_nodes", [1, 12])
def test_every_node_follows_its_own_path(params, num_nodes):
    drafter = TreeDrafter(DraftModel(MODEL), CONFIG)
    texts = {str(i): [5 + i, 9, 4, 2, 30 + i] for i in range(4)}
    rows = [row(text, num_nodes, name=name, params=params) for name, text in texts.items()]
    branching = 0
    for text, draft in zip(texts.values(), propose(drafter, *rows), strict=True):
        assert len(draft.token_ids) == num_nodes
        check(draft, text, params, MODEL)
        branching += len(set(draft.parents)) < num_nodes
    assert branching > 0 or num_nodes < 12


@pytest.mark.parametrize(
    ("changes", "ends"),
    [({}, {1}), ({"ignore_eos": True}, set()), ({"stop_token_ids": [7]}, {1, 7})],
    ids=["end of text", "ignored", "stop tokens"],
)
def test_nothing_is_drafted_after_a_token_that_ends_the_text(changes, ends):
    """The law of a model that ends its texts often, and draws another token as often."""
    law = torch.full((101, VOCAB), 0.1 / (VOCAB - 2))
    law[:, 1] = law[:, 7] = 0.45
    drafter = TreeDrafter(DraftModel(ContextModel(law, [1])), CONFIG)
    rows = [row([5 + i, 9, 4], 12, name=str(i), params=replace(PARAMS["noise"], seed=i, **changes)) for i in range(8)]
    tokens_with_children = set()
    for draft in propose(drafter, *rows):
        assert {1, 7} <= set(draft.token_ids)
        tokens_with_children |= {draft.token_ids[parent] for parent in draft.parents if parent >= 0}
    assert tokens_with_children & {1, 7} == {1, 7} - ends


def test_accepted_nodes_are_not_computed_again():
    model = Counting(MODEL)
    drafter, text = TreeDrafter(DraftModel(model), CONFIG), [5, 9, 4, 2, 30]
    draft = propose(drafter, row(text, 12))[0]
    deepest = max(paths(draft), key=len)
    model.passes.clear()
    propose(drafter, row([*text, *deepest, 7], 12))
    assert len(deepest) > 2
    assert model.passes[0] <= 2, "the token after the path, and at most the last node, which has no children"


def test_a_request_that_was_evicted_while_it_was_away_gets_a_tree_again():
    drafter, text = TreeDrafter(DraftModel(MODEL), EngineConfig(num_blocks=6, block_size=4, drafting="tree")), [5, 9, 4]
    propose(drafter, row(text, name="away"))
    propose(drafter, row([3] * 16, name="other"))
    assert "away" not in drafter.cache.prefixes
    (draft,) = propose(drafter, row([*text, 7], name="away"))
    assert len(draft.token_ids) == 4


def empty_tree(num_nodes, max_computed, *, width=8, end_ids=()):
    tree = BestFirstTree(0, num_nodes, width, end_ids)
    tree.max_computed = max_computed
    return tree


def branch_out(tree, level, law):
    """Add the children of a level."""
    for node in level:
        children = law(tokens_to(tree, node))
        tree.add(node, NextTokens(list(children), [0.0] * len(children)), list(children.values()))


def tokens_to(tree, node):
    return tuple(tree.nodes[step].token_id for step in tree.nodes[node].path)


def grow(num_nodes, law, *, max_computed=None, end_ids=()):
    """Grow a tree whose nodes have the children `law(path)`: {token: probability}, the likeliest first."""
    tree, level = empty_tree(num_nodes, max_computed or 4 * num_nodes, end_ids=end_ids), [TIP]
    while level:
        branch_out(tree, level, law)
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
    return [tuple(path) for path in paths(draft)[1:]]


def random_law(seed):
    def law(path):
        chance = random.Random(f"{seed} {path}")
        weights = sorted((chance.random() ** 3 for _ in range(3)), reverse=True)
        return {token: weight / sum(weights) * 0.95 for token, weight in enumerate(weights)}

    return law


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 6])
def test_no_tree_of_as_many_nodes_has_more_accepted_tokens_in_expectation(num_nodes):
    for seed in range(10):
        law = random_law(seed)
        paths = paths_of(grow(num_nodes, law).draft())
        assert len(set(paths)) == num_nodes
        every = [path for depth in range(1, num_nodes + 1) for path in itertools.product(range(3), repeat=depth)]
        best = sorted((probability(law, path) for path in every), reverse=True)[:num_nodes]
        assert total(law, paths) == pytest.approx(sum(best))


@pytest.mark.parametrize("num_nodes", [16, 32])
def test_a_nearly_sure_draft_is_deep_although_it_has_siblings(num_nodes):
    """Each level has unlikely nodes that could be computed; they must not use up the places of later levels."""

    def law(path):
        return {0: 0.9, 1: 0.06, 2: 0.04} if len(path) % 4 == 3 else {0: 0.98, 1: 0.015, 2: 0.005}

    paths = paths_of(grow(num_nodes, law, max_computed=3 * num_nodes).draft())
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


def grown_ahead(num_nodes, law, *, num_passes=12, width=8, max_depth=100, end_ids=()):
    """A tree that was sent and grows on, of any depth in each pass."""
    tree = grow(num_nodes, law, end_ids=end_ids)
    tree.max_computed = 1000
    for _ in range(num_passes):
        branch_out(tree, tree.likeliest(width, max_depth), law)
    return tree


def test_ahead_of_the_verdict_there_are_bounds():
    """Of places, of depth, of likelihood; and nothing follows the end of the text."""
    tree = grown_ahead(4, random_law(1), max_depth=3)
    assert max(len(node.path) for node in tree.nodes if node.compute_index is not None) == 3
    assert tree.likeliest(8, 3) == [], "what is left is too deep or too unlikely"
    probs = [probability(random_law(1), tokens_to(tree, node)) for node in range(len(tree.nodes))]
    assert min(prob for prob, node in zip(probs, tree.nodes, strict=True) if node.compute_index is not None) >= 0.01
    tree.max_computed = tree.num_computed + 2
    assert len(tree.likeliest(8, 100)) == 2
    assert tree.likeliest(8, 100) == []
    ending = grown_ahead(4, lambda _: {7: 0.6, 1: 0.4}, end_ids={7})
    assert {node.token_id for node in ending.nodes if node.compute_index is not None} == {1}


@pytest.mark.parametrize("num_nodes", [1, 4, 8])
def test_what_follows_a_node_of_a_tree_is_the_tree_that_would_be_grown_there(num_nodes):
    """Cut again and again, each time with what it lacks computed: its nodes, their likelihoods, their options."""
    for seed in range(10):
        law, walked, chance = random_law(seed), (), random.Random(seed)
        tree = grown_ahead(num_nodes, law)
        for _ in range(4):
            root = chance.choice([node for node in tree.next_tokens if len(tree.nodes[node].path) < 3])
            walked += tokens_to(tree, root)

            def after(path, law=law, walked=walked):
                return law(walked + path)

            tree.cut(root)
            assert tree.max_computed == tree.num_computed
            tree.max_computed = 1000
            while level := tree.next_level():
                branch_out(tree, level, after)
            fresh = grow(num_nodes, after)
            assert total(after, paths_of(tree.draft())) >= total(after, paths_of(fresh.draft())) - 1e-9
            assert tree.expected == pytest.approx(total(after, paths_of(tree.draft())))
            assert tree.gain == 0
            for node, options in tree.next_tokens.items():
                assert options.token_ids == list(after(tokens_to(tree, node)))
            for node in range(1, len(tree.nodes)):
                assert tree.child(tree.nodes[node].parent, tree.nodes[node].token_id) == node
            branch_out(tree, tree.likeliest(8, 100), after)


def test_children_beyond_the_width_are_computed_ahead_but_drafted_only_where_they_were_committed():
    def law(path):
        return {4: 0.4, 5: 0.3, 6: 0.2, 7: 0.1} if not path else {8: 0.9, 9: 0.06, 10: 0.04}

    tree, level = empty_tree(9, 100, width=2), [TIP]
    while level:
        branch_out(tree, level, law)
        level = tree.next_level()
    drafted = paths_of(tree.draft())
    assert {path[0] for path in drafted} == {4, 5}
    assert not any(10 in path for path in drafted)
    for _ in range(6):
        branch_out(tree, tree.likeliest(8, 100), law)
    unlikely = tree.child(TIP, 7)
    assert unlikely in tree.next_tokens
    assert {6, 7}.isdisjoint(path[0] for path in paths_of(tree.draft()))
    assert tree.child(unlikely, 8) is not None
    assert tree.child(unlikely, 10) is None, "at 0.1 * 0.04 it would not be computed ahead"
    tree.cut(unlikely)
    assert paths_of(tree.draft())[:2] == [(8,), (8, 8)]
    assert tree.expected > 2
