"""A head apart from its target drafts as it does beside it: its cache keeps nothing that came from its own guesses."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.learning.head_learner import HeadLearner
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_store import FeatureStore
from engine.drafting.registry import METHODS
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, ProposeRow, Request, VerifyRow, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.drafting.learning.texts import changed
from tests.engine.heads.cold_starts import KINDS
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import alone, backend_with_head, features_of, head_config

K = 4
CONFIG = EngineConfig(num_blocks=40, block_size=4, num_speculative_tokens=K, max_num_batched_tokens=16)


class Pair:
    """A target whose head drafts beside it, and the same head apart, whose drafts are compared."""

    def __init__(self, target_path, make_config=head_config, *, num_blocks=40, run_ahead=False):
        backend = backend_with_head(target_path, make_config())
        self.verifier = ModelVerifier(backend, CONFIG, None, METHODS["head"].make_in_target)
        self.features = FeatureStore(0.0)
        draft = DraftModel(alone(backend), run_ahead=run_ahead, features=self.features)
        self.drafter = METHODS["head_worker"].make(replace(CONFIG, num_blocks=num_blocks), draft)
        self.blocks = {}

    def request(self, name, tokens, *, temperature=0.7, blocks=()):
        """A request whose first `blocks` are those of another one."""
        first = 1 + sum(map(len, self.blocks.values()))
        self.blocks[name] = [*blocks, *range(first, first + 9)][:9]
        return Request(name, list(tokens), len(tokens), SamplingParams(temperature=temperature, seed=5))

    def compute(self, request, start=0):
        """Have the target compute all but the last token."""
        length = len(request.token_ids) - 1 - start
        for first in range(start, start + length, 3):
            size = min(3, start + length - first)
            row = VerifyRow(request, first, size, self.blocks[request.request_id], NO_DRAFT)
            run_in_process(self.verifier.verify([row]))

    def send(self, request, offset=0, *, end=None):
        """Send the features of all but the last token from `offset` on."""
        end = len(request.token_ids) - 1 if end is None else end
        rows = features_of(self.verifier, self.blocks[request.request_id], range(offset, end))
        row_bytes = self.verifier.kv.states[0, 0].nbytes
        return self.features.put(request.request_id, offset, end, rows, dtype="float32", row_bytes=row_bytes)

    def beside(self, *requests):
        """The drafts that the target's own head makes."""
        rows = [
            VerifyRow(one, len(one.token_ids) - 1, 1, self.blocks[one.request_id], Draft(num_deferred=K))
            for one in requests
        ]
        return [verdict.draft.token_ids for verdict in run_in_process(self.verifier.verify(rows))]

    def apart(self, *requests):
        rows = [ProposeRow(request, K) for request in requests]
        return [draft.token_ids for draft in run_in_process(self.drafter.propose(rows))]


VARIANTS = {
    "plain": head_config,
    "3.1": partial(head_config, fc_norm=True, norm_output=True),
    "two layers": partial(head_config, layers=2),
    **{kind: KINDS[kind] for kind in ("peagle", "dflash", "dspark")},
    "dspark, gated": partial(block_config, kind="dspark", markov_rank=4, markov_head_type="gated", draft_vocab=20),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_head_apart_drafts_what_it_drafts_beside_its_target_whatever_is_accepted(target_path, name, temperature):
    pair, chosen = Pair(target_path, VARIANTS[name]), random.Random(3)
    text = [60, *(chosen.randrange(2, 64) for _ in range(18))]  # with the mask of blocks
    long = pair.request("long", text, temperature=temperature)
    short = pair.request("short", [7, 3], temperature=temperature)
    sent = {"long": 0, "short": 0}
    for accepted in (2, 0, 4, 1, 0):
        for request in (long, short):
            pair.compute(request, sent[request.request_id])
            assert pair.send(request, sent[request.request_id])
        drafts = pair.apart(long, short)
        assert drafts == pair.beside(long, short)
        for request, draft in zip((long, short), drafts, strict=True):
            sent[request.request_id] = len(request.token_ids) - 1
            request.token_ids.extend([*draft[:accepted], chosen.randrange(2, 64)])
    assert pair.features.counts["missing"] == 0


@pytest.mark.parametrize("name", ["plain", "peagle", "dspark"])
def test_a_request_whose_features_are_missing_gets_an_empty_draft_and_the_others_theirs(target_path, name):
    pair = Pair(target_path, VARIANTS[name])
    one, two, single = pair.request("one", [5, 9, 2, 7]), pair.request("two", [8, 8, 3]), pair.request("single", [4])
    for request in (one, two):
        pair.compute(request)
    assert pair.send(one, end=2)
    assert pair.send(two)
    assert pair.apart(one, two, single) == [[], *pair.beside(two), []]
    assert pair.features.counts["missing"] == 1  # a head knows nothing about a text of one token
    assert pair.send(one, 1)
    assert pair.apart(one) == pair.beside(one)


def test_a_cached_prefix_has_its_features_in_the_first_round_of_a_request(target_path):
    pair = Pair(target_path)
    first = pair.request("first", [5, 9, 2, 7, 30, 12, 44, 8, 3])
    pair.compute(first)
    second = pair.request("second", [*first.token_ids[:8], 17, 21], blocks=pair.blocks["first"][:2])
    pair.compute(second, 8)
    assert pair.send(second)
    assert pair.apart(second) == pair.beside(second)


@pytest.mark.parametrize("name", ["plain", "peagle", "dflash"])
def test_what_was_evicted_is_asked_for_again_and_drafted_from_replayed_features(target_path, name):
    pair = Pair(target_path, VARIANTS[name], num_blocks=4)
    requests = [pair.request(name, [5, 9, 2, 7, 30, 12 + i]) for i, name in enumerate(("one", "two"))]
    for request in requests:
        pair.compute(request)
        assert pair.send(request)
        assert pair.apart(request) == pair.beside(request)
    assert "one" not in pair.drafter.cache.prefixes
    requests[0].token_ids.append(9)
    pair.compute(requests[0], 5)
    assert not pair.send(requests[0], 5)
    assert pair.apart(requests[0]) == [[]]
    assert pair.send(requests[0])
    assert pair.apart(requests[0]) == pair.beside(requests[0])


def test_a_request_that_was_forgotten_while_it_drafts_keeps_nothing(target_path):
    pair = Pair(target_path)
    request = pair.request("one", [5, 9, 2, 7])
    pair.compute(request)
    pair.send(request)
    take = pair.features.take

    def forget(request_id, count):
        pair.features.forget(request_id)
        return take(request_id, count)

    pair.features.take = forget
    assert pair.apart(request) == [[]]
    pair.features.take = take
    pair.send(request)
    assert pair.apart(request) == pair.beside(request)
    pair.drafter.release("one")
    assert pair.features.num_taken("one") == 0


@pytest.mark.parametrize("name", ["plain", "peagle", "dspark"])
def test_other_weights_draft_from_the_features_that_are_here(target_path, name):
    """Nothing is sent again, and drafts are those of a cache that never knew the former weights."""
    pair, fresh = Pair(target_path, VARIANTS[name]), Pair(target_path, VARIANTS[name])
    for each in (pair, fresh):
        each.compute(request := each.request("one", [5, 9, 2, 7, 30, 12, 44, 8, 3]))
        each.send(request)
    former = pair.apart(request)
    for each in (pair, fresh):
        backend = each.drafter.cache.backend
        backend.assign(changed(HeadLearner(backend, K).loaded, 1.0))
    pair.drafter.cache.restart()
    request.token_ids.append(17)
    for each in (pair, fresh):
        each.compute(request, 8)
        each.send(request, 8 if each is pair else 0)
    assert pair.apart(request) == fresh.apart(request) != former
    assert pair.features.counts["missing"] == 0


def test_the_cache_returns_the_features_that_were_sent_even_if_the_target_has_released_the_request(target_path):
    pair = Pair(target_path)
    request = pair.request("one", [5, 9, 2, 7, 30, 12])
    pair.compute(request)
    pair.send(request)
    pair.apart(request)
    sent = torch.frombuffer(bytearray(features_of(pair.verifier, pair.blocks["one"], range(2, 5))), dtype=torch.float32)
    pair.features.forget("one")
    pair.drafter.cache.restart()
    pair.drafter.cache.trim("one")  # they come once, and their blocks stay
    assert torch.equal(pair.drafter.cache.features_of("one", 2), sent.view(3, -1))
    assert pair.drafter.cache.features_of("one", 9).shape == (0, sent.numel() // 3)
    pair.drafter.release("one")
    assert len(pair.drafter.cache.features_of("one", 0)) == 0
