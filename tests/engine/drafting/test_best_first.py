"""The best tree of n nodes, by the probabilities of its candidates."""

import itertools
import random

import pytest

from engine.drafting.best_first import BestFirstTree
from engine.drafting.nodes import TIP
from engine.drafting.run_ahead.verdicts import Options


def branch_out(tree, level, law):
    """Add the children of a level."""
    for node in level:
        children = law(tokens_to(tree, node))
        tree.add(node, Options(list(children), [0.0] * len(children)), list(children.values()))


def tokens_to(tree, node):
    return tuple(tree.nodes[step].token_id for step in tree.path(node))


def grow(num_nodes, law, *, num_places=None, end_ids=()):
    """Grow a tree whose nodes have the children `law(path)`: {token: probability}, the likeliest first."""
    tree, level = BestFirstTree(num_nodes, num_places or 4 * num_nodes, end_ids), [TIP]
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


def grown_ahead(num_nodes, law, *, num_passes=12, width=8, max_depth=100, end_ids=()):
    """A tree that was sent and grows on, of any depth in each pass."""
    tree = grow(num_nodes, law, end_ids=end_ids)
    tree.num_places = 1000
    for _ in range(num_passes):
        branch_out(tree, tree.likeliest(width, max_depth), law)
    return tree


def test_ahead_of_the_verdict_the_likeliest_nodes_of_any_depth_are_computed():
    law = random_law(5)
    tree = grow(8, law)
    tree.num_places = 100
    before = {node: probability(law, tokens_to(tree, node)) for node in range(len(tree.nodes))}
    left = sorted((prob for node, prob in before.items() if tree.nodes[node].order is None), reverse=True)
    level = tree.likeliest(6, 100)
    assert [before[node] for node in level] == pytest.approx(left[:6])
    assert len({tree.nodes[node].depth for node in level}) > 1
    assert tree.likeliest(6, 100) != level, "no node is computed twice"


def test_ahead_of_the_verdict_there_are_bounds():
    """Of places, of depth, of likelihood; and nothing follows the end of the text."""
    tree = grown_ahead(4, random_law(1), max_depth=3)
    assert max(node.depth for node in tree.nodes if node.order is not None) == 3
    assert tree.likeliest(8, 3) == [], "what is left is too deep or too unlikely"
    probs = [probability(random_law(1), tokens_to(tree, node)) for node in range(len(tree.nodes))]
    assert min(prob for prob, node in zip(probs, tree.nodes, strict=True) if node.order is not None) >= 0.01
    tree.num_places = tree.num_computed + 2
    assert len(tree.likeliest(8, 100)) == 2
    assert tree.likeliest(8, 100) == []
    ending = grown_ahead(4, lambda _: {7: 0.6, 1: 0.4}, end_ids={7})
    assert {node.token_id for node in ending.nodes if node.order is not None} == {1}


@pytest.mark.parametrize("num_nodes", [1, 4, 8])
def test_what_follows_a_node_of_a_tree_is_the_tree_that_would_be_grown_there(num_nodes):
    """Cut again and again, each time with what it lacks computed: its nodes, their likelihoods, their options."""
    for seed in range(10):
        law, walked, chance = random_law(seed), (), random.Random(seed)
        tree = grown_ahead(num_nodes, law)
        for _ in range(4):
            root = chance.choice([node for node in tree.options if node == TIP or tree.nodes[node].depth < 3])
            walked += tokens_to(tree, root)

            def after(path, law=law, walked=walked):
                return law(walked + path)

            tree.cut(root)
            assert tree.num_places == tree.num_computed
            tree.num_places = 1000
            while level := tree.next_level():
                branch_out(tree, level, after)
            fresh = grow(num_nodes, after)
            assert total(after, paths_of(tree.draft())) >= total(after, paths_of(fresh.draft())) - 1e-9
            assert tree.expected == pytest.approx(total(after, paths_of(tree.draft())))
            assert tree.gain == 0
            for node, options in tree.options.items():
                assert options.token_ids == list(after(tokens_to(tree, node)))
            for node in range(len(tree.nodes)):
                assert tree.child(tree.nodes[node].parent, tree.nodes[node].token_id) == node
            branch_out(tree, tree.likeliest(8, 100), after)


def test_nodes_that_stay_are_counted_anew_in_the_order_in_which_they_were_computed():
    tree = grown_ahead(8, random_law(2))
    root = tree.child(TIP, 0)
    before = {tokens_to(tree, node): tree.nodes[node].order for node in range(len(tree.nodes))}
    orders = tree.cut(root)
    after = {tokens_to(tree, node): tree.nodes[node].order for node in range(len(tree.nodes))}
    assert {(0, *path) for path in after} == {path for path in before if path[0] == 0 and len(path) > 1}
    assert len(orders) == tree.num_computed > 5
    assert orders == sorted(orders)
    for path, order in after.items():
        assert before[0, *path] == (None if order is None else orders[order])


def test_a_level_gains_what_its_nodes_are_likelier_than_the_last_of_the_draft():
    tree = BestFirstTree(3, 12)
    branch_out(tree, [TIP], lambda _: {4: 0.5, 5: 0.3, 6: 0.2})
    assert tree.expected == pytest.approx(1.0)
    assert tree.gain == pytest.approx(0.3 + 0.1)
    branch_out(tree, tree.next_level(), lambda path: {7: 0.8, 8: 0.2})
    assert tree.expected == pytest.approx(0.5 + 0.4 + 0.3)
    assert tree.gain == pytest.approx(0.1), "of the last level, only one node may have children that are better"
    wider = BestFirstTree(8, 12)
    branch_out(wider, [TIP], lambda _: {4: 0.5, 5: 0.3, 6: 0.2})
    assert wider.gain == pytest.approx(1.0), "the draft has room for all of their children"


def test_children_beyond_the_width_are_computed_ahead_but_drafted_only_where_they_were_committed():
    def law(path):
        return {4: 0.4, 5: 0.3, 6: 0.2, 7: 0.1} if not path else {8: 0.9, 9: 0.06, 10: 0.04}

    tree, level = BestFirstTree(9, 100, width=2), [TIP]
    while level:
        branch_out(tree, level, law)
        level = tree.next_level()
    drafted = paths_of(tree.draft())
    assert {path[0] for path in drafted} == {4, 5}
    assert not any(10 in path for path in drafted)
    for _ in range(6):
        branch_out(tree, tree.likeliest(8, 100), law)
    unlikely = tree.child(TIP, 7)
    assert unlikely in tree.options
    assert {6, 7}.isdisjoint(path[0] for path in paths_of(tree.draft()))
    assert tree.child(unlikely, 8) is not None
    assert tree.child(unlikely, 10) is None, "at 0.1 * 0.04 it would not be computed ahead"
    tree.cut(unlikely)
    assert paths_of(tree.draft())[:2] == [(8,), (8, 8)]
    assert tree.expected > 2
