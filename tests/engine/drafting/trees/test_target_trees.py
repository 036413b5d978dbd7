"""A head's trees: every node is drafted from its own path's states, learned from, alike on all ranks, or refused."""

from dataclasses import replace

import pytest
import torch

from engine.protocols import Draft, run_in_process
from engine.sampling.logits import Run, noised, shape
from engine.verification.decider import paths
from tests.engine.drafting.proposing import PARAMS
from tests.engine.heads.test_eagle3 import TEXT, VARIANTS, dense_logits
from tests.engine.heads.tiny_heads import backend_with_head, head_config, make_verifier, prefill, tapped, verify_row


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["plain", "3.1", "two layers", "draft vocabulary"])
@torch.inference_mode()
def test_the_children_of_every_node_are_the_best_by_the_formulas(name, params, target_path):
    """So each node reads its parent's state and attends to its own path, without place 0, in rows of other trees."""
    backend = backend_with_head(target_path, head_config(**VARIANTS[name]))
    head, verifier = backend.model.head, make_verifier(backend, "head_tree")
    texts = [TEXT, TEXT[:4], TEXT[2:8]]
    rows = [verify_row(text, 9 - i, params=params, first_block=1 + 20 * i) for i, text in enumerate(texts)]
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
    verifier = make_verifier(backend_with_head(target_path, head_config()), "head_tree")
    row = verify_row(TEXT, 5, num_blocks=4)
    prefill(verifier, row)
    (verdict,) = run_in_process(verifier.verify([row]))
    assert len(verdict.draft.token_ids) == 5
    tree = verifier._drafter.tree_of(row.request.request_id)
    assert tree.max_computed == 4 * 4 - len(TEXT)
    (verdict,) = run_in_process(verifier.verify([verify_row(TEXT[:1], 5, first_block=30)]))
    assert verdict.draft == Draft(), "one token has no token before it"


@pytest.mark.parametrize("method", ["head", "head_tree"])
@torch.inference_mode()
def test_a_row_that_brings_a_draft_keeps_it_and_nothing_of_an_earlier_round_is_kept(method, target_path):
    drafter = make_verifier(backend_with_head(target_path, head_config()), method)._drafter
    deferred = verify_row(TEXT, 3)
    copied = replace(verify_row(TEXT, 0, first_block=30), draft=Draft([4, 5], [-1, 0], is_predicted=True))
    first, second = drafter.draft([copied, deferred], decides=True)
    assert first is copied
    assert len(second.draft.token_ids) == 3
    assert drafter.draft([copied], decides=True) == [copied]
    if method == "head_tree":
        assert not drafter.cache.prefixes
