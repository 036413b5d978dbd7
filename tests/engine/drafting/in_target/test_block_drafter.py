"""Drafts of blocks: each token is the one that its place's logits and noise give, and no text depends on them."""

from types import SimpleNamespace

import pytest
import torch

from engine.heads.dflash import MarkovHead
from engine.heads.head import NEVER
from engine.params import SamplingParams
from engine.protocols import run_in_process
from engine.sampling.logits import Run, draw, shape
from tests.engine.heads.test_dflash import FULL, SLIDING, block_config, dense_block, text_of
from tests.engine.heads.tiny_heads import VOCAB, backend_with_head, make_verifier, prefill, tapped, verify_row
from tests.engine.running import SAMPLING, make_engine
from tests.engine.test_exactness import LAWS, check_law, context_model
from tests.fakes import MarkovModel

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
    verifier = make_verifier(backend)
    params = [SamplingParams(temperature=0.7 * (i % 3), seed=i, max_tokens=64) for i in range(8)]
    texts, counts = [text_of(2 + 3 * i, seed=i) for i in range(8)], [7, 1, 4, 2, 3, 5, 6, 7]
    for first, text in enumerate(texts):
        prefill(verifier, verify_row(text, 0, first_block=1 + 9 * first))
    for changed in ({}, {6: LAWS["penalties"]}, {6: LAWS["top_p"]}):
        rows = [
            verify_row(text, count, first_block=1 + 9 * i, params=changed.get(i, params[i]))
            for i, (text, count) in enumerate(zip(texts, counts, strict=True))
        ]
        verdicts = run_in_process(verifier.verify(rows))
        expected = [expected_draft(backend, row.request, count) for row, count in zip(rows, counts, strict=True)]
        assert [verdict.draft.token_ids for verdict in verdicts] == expected


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
    head.model = target.model = SimpleNamespace(module=module, drafts_blocks=True)
    target.beside = lambda part, kv: (head, kv)
    return target


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize(("name", "has_markov"), [("warm", True), ("penalties", False)])
def test_three_tokens_have_the_targets_joint_law(verification, name, has_markov):
    model = drafted_by(context_model(1), laws_of(2), laws_of(3) if has_markov else None)
    engine = make_engine(model, drafting="head", verification=verification, **SAMPLING)
    check_law(engine, name, 600)
    assert 0 < engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens
