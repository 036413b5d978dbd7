"""Drafts of blocks: each token is the one that its place's logits and noise give, and no text depends on them."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.heads.dflash import MarkovHead
from engine.heads.head import NEVER
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, run_in_process
from engine.sampling.logits import Run, draw, shape
from tests.engine.heads.test_dflash import (
    FULL,
    SLIDING,
    block_config,
    dense_block,
    prefill,
    tapped,
    text_of,
    verify_row,
)
from tests.engine.heads.test_dflash import make_verifier as verifier_of
from tests.engine.heads.tiny_heads import VOCAB, backend_with_head
from tests.engine.running import SAMPLING, expected_tokens, make_engine, run
from tests.engine.test_exactness import LAWS, LENGTH, PROMPT, context_model, joint_law
from tests.fakes import MarkovModel

GREEDY = SamplingParams(temperature=0)
HEADS = {
    "dflash": {"types": [SLIDING, FULL], "draft_vocab": 20},
    "vanilla": {"kind": "dspark", "sample_from_anchor": True, "markov_rank": 5, "draft_vocab": 20},
    "gated": {"kind": "dspark", "sample_from_anchor": True, "markov_rank": 5, "markov_head_type": "gated"},
    "rnn": {"kind": "dspark", "markov_rank": 5, "markov_head_type": "rnn", "draft_vocab": 20},
}


def expected_draft(backend, request, count):
    """The draft of one request, from left to right, by the formulas."""
    head, drafted, state = backend.model.head, [], None
    ids = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
    text, unread = request.token_ids, 0 if head.config.sample_from_anchor else 1
    hidden = dense_block(head, tapped(backend, text[:-1]), text[-1], count + unread)[unread:]
    for depth, place in enumerate(hidden):
        logits = head.lm_head(place)
        if head.config.markov_rank:
            bias, state = head.markov_head(torch.tensor([[*text, *drafted][-1]]), place[None], state)
            logits = logits + bias[0]
        row = torch.full((1, VOCAB), NEVER).index_copy_(1, ids, logits[None])
        runs = [Run(request, [depth], [list(drafted)])]
        drafted.append(int(draw(shape(row, runs), runs)))
    return drafted


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_each_token_is_the_one_that_its_place_and_noise_give(target_path, name):
    """8 requests in one pass; then with one whose parameters depend on the tokens drawn before."""
    backend = backend_with_head(target_path, block_config(**HEADS[name]))
    backend.model.head.norm.weight.mul_(0.1)  # so that noise and biases matter
    for name, parameter in backend.model.head.named_parameters():
        parameter.mul_(4 if "markov" in name else 1)
    verifier = verifier_of(backend)
    params = [SamplingParams(temperature=0.7 * (i % 3), seed=i, max_tokens=64) for i in range(8)]
    texts, counts = [text_of(2 + 3 * i, seed=i) for i in range(8)], [7, 1, 4, 2, 3, 5, 6, 7]
    for first, text in enumerate(texts):
        prefill(verifier, text, 1 + 9 * first)
    for changed in ({}, {6: LAWS["penalties"]}, {6: LAWS["top_p"]}):
        rows = [
            verify_row(text, count, first_block=1 + 9 * i, params=changed.get(i, params[i]))
            for i, (text, count) in enumerate(zip(texts, counts, strict=True))
        ]
        verdicts = run_in_process(verifier.verify(rows))
        expected = [expected_draft(backend, row.request, count) for row, count in zip(rows, counts, strict=True)]
        assert [verdict.draft.token_ids for verdict in verdicts] == expected


@torch.inference_mode()
def test_a_draft_is_no_longer_than_a_block_and_empty_without_a_context(target_path):
    verifier = verifier_of(backend_with_head(target_path, block_config(block_size=4)))
    prefill(verifier, text_of(5))
    verdicts = run_in_process(verifier.verify([verify_row([7], 3, first_block=20), verify_row(text_of(5), 9)]))
    assert verdicts[0].draft == NO_DRAFT
    assert len(verdicts[1].draft.token_ids) == 3


# --- Text -------------------------------------------------------------------------------------------------------------


class PlaceModel(MarkovModel):
    """A model whose next token depends on its position alone: on that of the place, and `shift`."""

    shift = 1

    def logits(self, batch):
        return self.transitions[(batch.positions[batch.logit_indices] + self.shift) % len(self.transitions)].log()

    def law(self, token_ids):
        return self.transitions[len(token_ids) % len(self.transitions)]


def laws_of(seed):
    return torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


def drafted_by(target, laws, markov_laws=None, num_unread=1):
    """A target with a head that drafts by the laws of its places, times those of the tokens before them."""
    markov = None if markov_laws is None else MarkovHead(block_config(markov_rank=5))
    if markov is not None:
        markov.markov_w1.weight.data, markov.markov_w2.weight.data = torch.eye(5), markov_laws.log().T
    head = PlaceModel(laws)
    head.shift = 1 - num_unread
    facts = {"num_unread": num_unread, "markov_head": markov, "target_ids": None, "drafts_blocks": True}
    module = SimpleNamespace(config=SimpleNamespace(max_draft_tokens=99, mask_token_id=0), **facts)
    head.model = target.model = SimpleNamespace(module=module, head=module)
    target.beside = lambda part, kv: (head, kv)
    return target


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("kind", ["fill-in", "anchor first", "markov"])
def test_all_drafts_are_accepted_if_the_heads_logits_are_the_targets(verification, kind):
    laws, unread = laws_of(1), int(kind == "fill-in")
    model = drafted_by(PlaceModel(laws), laws, None, unread)
    if kind == "markov":
        model = drafted_by(MarkovModel(laws), torch.ones(5, 5), laws, unread)
        model.law = lambda token_ids: laws[token_ids[-1]]
    params = [replace(one, max_tokens=15, ignore_eos=True) for one in (LAWS["plain"], LAWS["warm"], GREEDY)]
    requests = [([i % 5, 3], replace(params[i % 3], seed=i, num_speculative_tokens=1 + i % 5)) for i in range(30)]
    engine = make_engine(model, drafting="head", verification=verification, num_speculative_tokens=5)
    texts = run(engine, requests)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    if verification == "coupled":
        assert texts == {str(i): expected_tokens(model, *request) for i, request in enumerate(requests)}


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize(("name", "has_markov"), [("plain", False), ("warm", True), ("penalties", False)])
def test_three_tokens_have_the_targets_joint_law(verification, name, has_markov):
    """6 tests of 600 samples; at 1e-5 each, a false alarm has probability below 1e-4."""
    model = drafted_by(context_model(1), laws_of(2), laws_of(3) if has_markov else None)
    params = replace(LAWS[name], max_tokens=LENGTH + 2, ignore_eos=True)
    engine = make_engine(model, drafting="head", verification=verification, **SAMPLING)
    texts = run(engine, [(PROMPT, replace(params, seed=seed)) for seed in range(600)])
    assert p_value(Counter(tuple(text[:LENGTH]) for text in texts.values()), joint_law(LAWS[name])) > 1e-5
    assert 0 < engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens


# --- Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_rank_that_does_not_decide_gets_the_tokens_that_the_first_one_drew(verification):
    rows = [verify_row([1, 2, 3, 4], 3, params=LAWS["penalties"]), verify_row([0, 3], 2, first_block=40)]
    shared, drafts = [], []
    for decides in (True, False):
        model = drafted_by(context_model(1), laws_of(2), laws_of(3))
        model.reducer = SimpleNamespace(sum=lambda partial: shared.append(partial) or sum(shared))
        verifier = verifier_of(model, verification=verification)
        drafts.append([row.draft for row in verifier._drafter.draft(rows, decides=decides)])
    assert [draft.token_ids for draft in drafts[0]] == [draft.token_ids for draft in drafts[1]]
    assert [len(draft.token_ids) for draft in drafts[0]] == [3, 2]
    assert len(shared) == 2, "one sum a pass"
    assert not shared[1].any()
