"""The tree drafter: the best tree of n nodes, by the probabilities of its candidates and by shared noise."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import NextTokens
from engine.drafting.trees.levelwise import TIP
from engine.drafting.trees.tree_drafter import BestFirstTree, TreeDrafter
from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling.logits import Run, noised, shape
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import context_model, propose, row
from tests.engine.running import make_engine, run
from tests.fakes import ContextModel, LateModel

CONFIG = EngineConfig(num_blocks=1000, block_size=4, max_num_batched_tokens=24, drafting="tree")
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "noise": SamplingParams(temperature=0.8, seed=3),
    "penalties": SamplingParams(temperature=0.8, seed=3, presence_penalty=2.0, frequency_penalty=1.0, top_k=20),
}


MODEL = context_model(1, sharpness=2)


def scores_after(model, text, drafted, params):
    """What draft and target score the next token by, from the law itself."""
    one = [Run(Request("a", text, 3, params), [len(drafted)], [drafted], model.info.eos_token_ids)]
    return noised(shape(model.law([*text, *drafted]).log().unsqueeze(0), one), one)[0]


def check(draft, text, params, model):
    """Assert that the children of every node are the tokens with the highest scores there, the best first."""
    before = paths(draft)
    for parent in range(-1, len(draft.token_ids)):
        children = [t for t, p in zip(draft.token_ids, draft.parents, strict=True) if p == parent]
        if children:
            expected = scores_after(model, text, before[parent + 1], params).topk(3).indices.tolist()
            assert children == expected[: len(children)]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("num_nodes", [1, 3, 12])
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


def test_width_one_is_the_chain():
    narrow = TreeDrafter(DraftModel(MODEL), CONFIG)
    narrow.width = 1
    one = row([5, 9, 4, 2], 6, params=PARAMS["noise"])
    assert propose(narrow, one) == propose(ModelDrafter(DraftModel(MODEL), EngineConfig(num_blocks=1000)), one)


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


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_a_tree_keeps_to_the_blocks_there_are(num_blocks):
    """The draft itself fits; of the nodes that turn out not to be of it, only some can be computed."""
    model, params = context_model(1, sharpness=1), PARAMS["noise"]
    drafter = TreeDrafter(DraftModel(model), EngineConfig(num_blocks=num_blocks, block_size=4, drafting="tree"))
    text = [5, 9, 4, 2, 30]
    for _ in range(2):
        (draft,) = propose(drafter, row(text, min(8, num_blocks * 4 - len(text) - 1), params=params))
        check(draft, text, params, model)
        text += [*max(paths(draft), key=len), 3]


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["noise"]], ids=["greedy", "noise"])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(params):
    rows = [row([5, 9, 4], 4, params=params), row([7, 7, 2, 8], 6, name="b", params=params)]
    assert propose(TreeDrafter(DraftModel(LateModel(MODEL)), CONFIG), *rows) == propose(
        TreeDrafter(DraftModel(MODEL), CONFIG), *rows
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_nodes", [4, 8, 16])
def test_a_tree_has_more_accepted_than_a_chain_of_as_many_nodes(num_nodes, temperature):
    """A draft that is like the target, but not the same."""
    weights = 2 * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(1))
    other = 2 * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(2))
    target, draft = (ContextModel(table.softmax(-1)) for table in (weights, weights + 0.4 * other))
    requests = [
        ([5 + i, 9, 4], SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True))
        for i in range(24)
    ]
    lengths = []
    for drafting, drafter in (("model", ModelDrafter), ("tree", TreeDrafter)):
        engine = make_engine(
            target, partial(drafter, DraftModel(draft)), num_speculative_tokens=num_nodes, drafting=drafting
        )
        run(engine, requests)
        lengths.append(engine.stats.num_accepted_tokens / engine.stats.num_drafts)
    assert lengths[1] > lengths[0]


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


def test_the_first_nodes_are_the_best_smaller_tree():
    law = random_law(3)
    whole = grow(8, law).draft()
    for count in range(1, 8):
        smaller = grow(count, law).draft()
        assert (whole.token_ids[:count], whole.parents[:count]) == (smaller.token_ids, smaller.parents)


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


def test_no_more_nodes_are_computed_than_there_are_places():
    for seed in range(30):
        for num_nodes in (1, 2, 3, 8, 16):
            tree = grow(num_nodes, random_law(seed), max_computed=num_nodes)
            assert tree.num_computed <= num_nodes
            assert len(tree.draft().token_ids) == num_nodes


def test_a_node_after_which_nothing_is_possible_has_no_children():
    draft = grow(3, lambda path: {} if path else {4: 1.0}).draft()
    assert (draft.token_ids, draft.parents) == ([4], [-1])


def grown_ahead(num_nodes, law, *, num_passes=12, width=8, max_depth=100, end_ids=()):
    """A tree that was sent and grows on, of any depth in each pass."""
    tree = grow(num_nodes, law, end_ids=end_ids)
    tree.max_computed = 1000
    for _ in range(num_passes):
        branch_out(tree, tree.likeliest(width, max_depth), law)
    return tree


def test_ahead_of_the_verdict_the_likeliest_nodes_of_any_depth_are_computed():
    law = random_law(5)
    tree = grow(8, law)
    tree.max_computed = 100
    before = {node: probability(law, tokens_to(tree, node)) for node in range(1, len(tree.nodes))}
    left = sorted((prob for node, prob in before.items() if tree.nodes[node].compute_index is None), reverse=True)
    level = tree.likeliest(6, 100)
    assert [before[node] for node in level] == pytest.approx(left[:6])
    assert len({len(tree.nodes[node].path) for node in level}) > 1
    assert tree.likeliest(6, 100) != level, "no node is computed twice"


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


def test_a_level_gains_what_its_nodes_are_likelier_than_the_last_of_the_draft():
    tree = empty_tree(3, 12)
    branch_out(tree, [TIP], lambda _: {4: 0.5, 5: 0.3, 6: 0.2})
    assert tree.expected == pytest.approx(1.0)
    assert tree.gain == pytest.approx(0.3 + 0.1)
    branch_out(tree, tree.next_level(), lambda path: {7: 0.8, 8: 0.2})
    assert tree.expected == pytest.approx(0.5 + 0.4 + 0.3)
    assert tree.gain == pytest.approx(0.1), "of the last level, only one node may have children that are better"
    wider = empty_tree(8, 12)
    branch_out(wider, [TIP], lambda _: {4: 0.5, 5: 0.3, 6: 0.2})
    assert wider.gain == pytest.approx(1.0), "the draft has room for all of their children"


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
