"""Trees that are sampled: their rows are what the tokens came from, and their shape knows nothing of the tokens.

The joint law of texts is tests/engine/test_exactness.py's; the rule's own, tests/engine/verification's.
"""

import itertools
import math
from collections import Counter

import pytest
import torch

from engine.config import EngineConfig
from engine.control.acceptance import Acceptance
from engine.drafting.check import draft_problem
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.trees.levelwise import TIP
from engine.drafting.trees.sampled_tree import SampledTree, SampledTreeDrafter, chains, likeliest_shape
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process
from tests.fakes import MarkovModel

LAW = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]])
MODEL = MarkovModel(LAW)


def drafts_of(verification, num_nodes, count, *, temperature=1.0, drafter=None, text=(0, 1, 2)):
    config = EngineConfig(num_blocks=8000, max_num_batched_tokens=10**6, drafting="tree", verification=verification)
    drafter = drafter or SampledTreeDrafter(DraftModel(MODEL), config)
    rows = [
        ProposeRow(Request(str(i), list(text), 3, SamplingParams(temperature=temperature, seed=i)), num_nodes)
        for i in range(count)
    ]
    return run_in_process(drafter.propose(rows))


def test_siblings_without_replacement_come_in_the_order_of_their_law_with_what_is_left():
    drafts = drafts_of("rejection", 3, 4000)
    (parents,) = {tuple(draft.parents) for draft in drafts}
    siblings = [node for node, parent in enumerate(parents) if parent == -1]
    assert len(siblings) >= 1
    law = {}
    for tokens in itertools.permutations(range(4), len(siblings)):
        prob, left = 1.0, 1.0
        for token in tokens:
            prob, left = prob * float(LAW[2, token]) / left, left - float(LAW[2, token])
        law[tokens] = prob
    counts = Counter(tuple(draft.token_ids[node] for node in siblings) for draft in drafts)
    assert p_value(counts, law) > 1e-5


def wide(verification="rejection"):
    """A drafter whose trees have siblings, because the first child is rarely right."""
    config = EngineConfig(num_blocks=8000, max_num_batched_tokens=10**6, drafting="tree", verification=verification)
    drafter = SampledTreeDrafter(DraftModel(MODEL), config)
    drafter._acceptance = {is_greedy: Acceptance([0.3, 0.25, 0.2]) for is_greedy in (False, True)}
    return drafter


def test_a_rows_of_a_sibling_lacks_its_earlier_siblings_and_sums_to_one():
    for draft in drafts_of("rejection", 6, 50, drafter=wide()):
        assert draft.parents.count(-1) == 3
        for node, parent in enumerate(draft.parents):
            row = dict(zip(draft.top_ids[node], draft.top_probs[node], strict=True))
            earlier = [draft.token_ids[i] for i in range(node) if draft.parents[i] == parent]
            context = 2 if parent == -1 else draft.token_ids[parent]
            left = LAW[context].clone()
            left[earlier] = 0
            assert [row[token] for token in range(4)] == pytest.approx((left / left.sum()).tolist(), abs=1e-6)
            assert draft.token_ids[node] not in earlier


def test_what_siblings_are_drawn_from_is_known_at_a_low_temperature_too():
    """What the first sibling leaves of a row has no digits in single precision."""
    temperature = 0.01
    logits = (LAW[2].double().log() / temperature).tolist()
    for draft in drafts_of("rejection", 3, 20, drafter=wide(), temperature=temperature):
        assert draft.parents == [-1] * 3
        for node in range(3):
            row = dict(zip(draft.top_ids[node], draft.top_probs[node], strict=True))
            weights = [
                0.0 if token in draft.token_ids[:node] else math.exp(logit - max(logits))
                for token, logit in enumerate(logits)
            ]
            assert [row[token] for token in range(4)] == pytest.approx([w / sum(weights) for w in weights], rel=1e-3)
            assert draft_problem(draft, 3, 4) is None


def test_independent_chains_are_draws_of_one_law_each():
    drafts = drafts_of("k_sequential", 6, 4000)
    assert {tuple(draft.parents) for draft in drafts} == {(-1, -1, -1, 0, 1, 2)}
    pair_law = {
        (a, b, c): float(LAW[2, a] * LAW[2, b] * LAW[a, c]) for a, b, c in itertools.product(range(4), repeat=3)
    }
    counts = Counter((d.token_ids[0], d.token_ids[1], d.token_ids[3]) for d in drafts)
    assert p_value(counts, pair_law) > 1e-5
    second = Counter((d.token_ids[3], d.token_ids[4]) for d in drafts if d.token_ids[0] == d.token_ids[1] == 2)
    expected = {(a, b): float(LAW[2, a] * LAW[2, b]) for a, b in itertools.product(range(4), repeat=2)}
    assert p_value(second, expected) > 1e-5, "chains that begin alike go on independently"
    row = dict(zip(drafts[0].top_ids[1], drafts[0].top_probs[1], strict=True))
    assert [row[token] for token in range(4)] == pytest.approx(LAW[2].tolist(), abs=1e-6)


@pytest.mark.parametrize("verification", ["rejection", "k_sequential"])
def test_a_greedy_draft_is_certain_of_its_tokens(verification):
    (draft,) = drafts_of(verification, 6, 1, temperature=0.0, drafter=wide(verification))
    assert draft.token_ids[0] == 2
    for token, ids, probs in zip(draft.token_ids, draft.top_ids, draft.top_probs, strict=True):
        assert dict(zip(ids, probs, strict=True)) == {i: float(i == token) for i in range(4)}
    if verification == "k_sequential":
        assert draft.is_chain, "greedy chains would all be the same"
    else:
        assert draft.parents.count(-1) == 3


def test_the_next_round_draws_anew():
    """What the last round rejected must not decide what this one proposes at the same positions."""
    drafter = wide()
    first = drafts_of("rejection", 6, 300, drafter=drafter)
    second = drafts_of("rejection", 6, 300, drafter=drafter, text=(0, 1, 2, 2))
    # The second level of the first round, after token 2, and the first of the second are drawn from one law.
    same = sum(
        a.token_ids[a.parents.index(a.token_ids.index(2))] == b.token_ids[0]
        for a, b in zip(first, second, strict=True)
        if 2 in a.token_ids[:3] and a.token_ids.index(2) in a.parents
    )
    pairs = sum(2 in a.token_ids[:3] and a.token_ids.index(2) in a.parents for a in first)
    assert pairs > 50
    assert same < 0.6 * pairs


def test_the_likeliest_shape_has_the_best_nodes_and_siblings_in_order():
    assert likeliest_shape(4, [0.9, 0.05]) == [-1, 0, 1, 2]
    assert likeliest_shape(3, [0.4, 0.3]) == [-1, -1, 0]
    assert likeliest_shape(3, [0.3, 0.4]) == [-1, -1, 0], "a later sibling comes after the earlier ones"
    assert likeliest_shape(2, [0.5]) == [-1, 0]


def test_chains_share_the_nodes_evenly():
    assert chains(6, 2) == [-1, -1, 0, 1, 2, 3]
    assert chains(5, 3) == [-1, -1, -1, 0, 1]
    assert chains(2, 3) == [-1, -1]


def test_a_tree_that_lacks_tokens_lacks_what_would_follow_them():
    tree = SampledTree(0, [-1, -1, 0, 1])
    tree.add(TIP, [7], [([7], [1.0])])
    assert tree.next_level() == [1]
    tree.add(1, [8], [([8], [1.0])])
    assert tree.next_level() == []
    draft = tree.draft()
    assert (draft.token_ids, draft.parents) == ([7, 8], [-1, 0])


def test_nothing_is_drafted_after_the_end_of_the_text():
    tree = SampledTree(0, [-1, 0], {7})
    tree.add(TIP, [7], [([7], [1.0])])
    assert tree.next_level() == []


def test_how_often_siblings_are_accepted_is_learned():
    drafter = wide()
    rows = [ProposeRow(Request("a", [0, 1, 2], 3, SamplingParams(seed=1)), 6)]
    for _ in range(400):
        (draft,) = run_in_process(drafter.propose(rows))
        second = [token for token, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == -1][-1]
        rows = [ProposeRow(Request("a", [*rows[0].request.token_ids, second], 3, SamplingParams(seed=1)), 6)]
    first, *others = (drafter._acceptance[False].rate(rank) for rank in range(3))
    assert first < 0.5 < max(others) + 0.1
