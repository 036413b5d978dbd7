"""Trees that are sampled: their rows are what the tokens came from, and their shape knows nothing of the tokens."""

import math

import pytest
import torch

from engine.config import EngineConfig
from engine.control.acceptance import Acceptance
from engine.drafting.check import draft_problem
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.trees.sampled_tree import SampledTreeDrafter, likeliest_shape
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


def test_the_likeliest_shape_has_the_best_nodes_and_siblings_in_order():
    assert likeliest_shape(4, [0.9, 0.05]) == [-1, 0, 1, 2]
    assert likeliest_shape(3, [0.4, 0.3]) == [-1, -1, 0]
    assert likeliest_shape(3, [0.3, 0.4]) == [-1, -1, 0], "a later sibling comes after the earlier ones"
    assert likeliest_shape(2, [0.5]) == [-1, 0]
