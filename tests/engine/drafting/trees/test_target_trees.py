"""A head's trees: every node is drafted from its own path's states, learned from, alike on all ranks, or refused."""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.drafting.settle import choose_method
from engine.errors import ConfigError
from engine.params import SamplingParams
from engine.protocols import Draft, Request, VerifyRow, run_in_process
from engine.sampling.logits import Run, noised, shape
from engine.verification.decider import paths
from engine.verification.verifier import ModelVerifier
from tests.engine.heads.test_eagle3 import TEXT, VARIANTS, dense_logits, tapped
from tests.engine.heads.tiny_heads import backend_with_head, head_config

PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "noise": SamplingParams(temperature=0.8, seed=3),
    "penalties": SamplingParams(temperature=0.8, seed=3, presence_penalty=2.0, frequency_penalty=1.0, top_k=20),
}


def make_verifier(backend, method="head_tree"):
    config = EngineConfig(num_blocks=80, block_size=4, drafting=method)
    return ModelVerifier(backend, config, None, METHODS[method].make_in_target)


def row_of(text, num_nodes, params=PARAMS["greedy"], first_block=1, num_blocks=10):
    request = Request(str(first_block), list(text), len(text), params)
    blocks = list(range(first_block, first_block + num_blocks))
    return VerifyRow(request, len(text) - 1, 1, blocks, Draft(num_deferred=num_nodes))


def prefill(verifier, row):
    prompt = VerifyRow(row.request, 0, row.start, row.block_ids, Draft())
    run_in_process(verifier.verify([prompt]))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["plain", "3.1", "two layers", "draft vocabulary"])
@torch.inference_mode()
def test_the_children_of_every_node_are_the_best_by_the_formulas(name, params, target_path):
    """So each node reads its parent's state and attends to its own path, without place 0, in rows of other trees."""
    backend = backend_with_head(target_path, head_config(**VARIANTS[name]))
    head, verifier = backend.model.head, make_verifier(backend)
    texts = [TEXT, TEXT[:4], TEXT[2:8]]
    rows = [row_of(text, 9 - i, params, 1 + 20 * i) for i, text in enumerate(texts)]
    for row in rows:
        prefill(verifier, row)
    branching = 0
    for text, drafted in zip(texts, verifier._drafter.draft(rows, decides=True), strict=True):
        draft, taps = drafted.draft, tapped(backend, text[:-1])
        before = paths(draft)
        for parent in sorted({*draft.parents}):
            path = before[parent + 1]
            logits = dense_logits(head, taps, text, path)[-1]
            if head.target_ids is not None:
                logits = torch.full((64,), -1e30).index_copy(-1, head.target_ids, logits)
            run = Run(drafted.request, [len(path)], [path], ())
            scores = noised(shape(logits.unsqueeze(0), [run]), [run])[0]
            children = [t for t, p in zip(draft.token_ids, draft.parents, strict=True) if p == parent]
            assert children == scores.topk(3).indices.tolist()[: len(children)]
            branching += len(children) > 1
    assert branching


def test_a_tree_comes_back_with_the_verdict_and_fits_into_the_blocks_of_its_row(target_path):
    verifier = make_verifier(backend_with_head(target_path, head_config()))
    row = row_of(TEXT, 5, num_blocks=4)
    prefill(verifier, row)
    (verdict,) = run_in_process(verifier.verify([row]))
    assert len(verdict.draft.token_ids) == 5
    tree = verifier._drafter.tree_of(row.request.request_id)
    assert tree.max_computed == 4 * 4 - len(TEXT)
    (verdict,) = run_in_process(verifier.verify([row_of(TEXT[:1], 5, first_block=30)]))
    assert verdict.draft == Draft(), "one token has no token before it"


def test_scores_are_weighed_by_what_was_committed_after_them(target_path):
    verifier = make_verifier(backend_with_head(target_path, head_config()))
    confidence = verifier._drafter._confidence
    before = dict(confidence._sharpness)
    row = row_of(TEXT, 5)
    prefill(verifier, row)
    (verdict,) = run_in_process(verifier.verify([row]))
    assert confidence._sharpness == before
    row = row_of([*TEXT, *verdict.token_ids], 5)
    run_in_process(verifier.verify([row]))
    assert confidence._sharpness[True] != before[True]
    assert confidence._sharpness[False] == before[False]


@pytest.mark.parametrize("method", ["head", "head_tree"])
@torch.inference_mode()
def test_a_row_that_brings_a_draft_keeps_it_and_nothing_of_an_earlier_round_is_kept(method, target_path):
    drafter = make_verifier(backend_with_head(target_path, head_config()), method)._drafter
    deferred = row_of(TEXT, 3)
    copied = replace(row_of(TEXT, 0, first_block=30), draft=Draft([4, 5], [-1, 0], is_predicted=True))
    first, second = drafter.draft([copied, deferred], decides=True)
    assert first is copied
    assert len(second.draft.token_ids) == 3
    assert drafter.draft([copied], decides=True) == [copied]
    if method == "head_tree":
        assert not drafter.cache.prefixes


def test_its_drafts_count_as_trees_that_only_the_coupled_rule_verifies():
    with pytest.raises(ConfigError, match="drafting is 'head_tree', which allows coupled"):
        choose_method(EngineConfig(drafting="head_tree", verification="rejection"), has_draft_model=False)
