"""A target that drafts for itself: the text and its law are the target's own, whatever its first layers draft."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Request, VerifyRow, chain, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.conftest import save_llama
from tests.engine.running import SAMPLING, expected_tokens, make_engine, run
from tests.engine.test_exactness import LAWS, LENGTH, PROMPT, joint_law
from tests.engine.tiny import backend_of
from tests.fakes import SelfDraftingModel

SELF = {"drafting": "self", "self_draft_layers": 1}


def laws(seed, states=9, vocab=5):
    return torch.randn(states, vocab, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def model_of(thinned_seed):
    """The target of `test_exactness`, whose first layer has its own laws (seed 1) or others."""
    return SelfDraftingModel(laws(1), laws(thinned_seed))


# --- Law --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "thinned_seed"),
    [("plain", 1), ("plain", 2), ("penalties", 2)],
    ids=["like", "unlike", "unlike, penalties"],
)
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_three_tokens_have_the_targets_joint_law(verification, name, thinned_seed):
    """9 tests of 1,000 samples; at 1e-5 each, a false alarm has probability below 2e-4."""
    params = replace(LAWS[name], max_tokens=LENGTH + 2, ignore_eos=True)
    engine = make_engine(model_of(thinned_seed), **SELF, **SAMPLING, verification=verification)
    texts = run(engine, [(PROMPT, replace(params, seed=seed)) for seed in range(1000)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, joint_law(LAWS[name])) > 1e-5
    if thinned_seed == 1:
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    else:
        assert 0 < engine.stats.num_accepted_tokens < 0.9 * engine.stats.num_draft_tokens


@pytest.mark.parametrize("thinned_seed", [1, 2], ids=["like", "unlike"])
def test_texts_of_rows_that_the_pass_draws_and_rows_that_need_shaping_are_the_targets(thinned_seed):
    """In one batch, with drafts of every length; the model notices a token that not all layers have computed."""
    params = [*LAWS.values(), SamplingParams(temperature=0)]
    requests = [
        (
            [i % 5, i % 3, 1],
            replace(params[i % 7], seed=i, max_tokens=20 + i % 7, ignore_eos=True, num_speculative_tokens=i % 6),
        )
        for i in range(56)
    ]
    model = model_of(thinned_seed)
    engine = make_engine(model, **SELF, num_speculative_tokens=5, block_size=4)
    assert run(engine, requests) == {str(i): expected_tokens(model, *request) for i, request in enumerate(requests)}
    assert engine.stats.num_draft_tokens > 0


# --- Passes -----------------------------------------------------------------------------------------------------------


def verify_row(token_ids, count, *, first_block=1, params=None):
    request = Request(f"{first_block}", list(token_ids), 3, params or SamplingParams(temperature=0))
    blocks = list(range(first_block, first_block + 10))
    return VerifyRow(request, len(token_ids) - 1, 1, blocks, Draft(num_deferred=count))


def prefilled(verifier, row):
    """The row, after its committed tokens but the last have been computed."""
    run_in_process(verifier.verify([replace(row, start=0, length=len(row.request.token_ids) - 1, draft=Draft())]))
    return row


def make_verifier(model, **settings):
    config = EngineConfig(num_blocks=80, block_size=4, **(SELF | settings))
    return ModelVerifier(model, config, None, METHODS["self"].make_in_target)


def test_the_draft_comes_back_with_the_verdict_and_costs_one_pass_a_token():
    model = model_of(2)
    verifier = make_verifier(model)
    rows = [
        prefilled(verifier, verify_row([1, 2, 3, 4], 3)),
        prefilled(verifier, verify_row([4, 2, 1], 0, first_block=20)),
        prefilled(verifier, verify_row([0, 0, 3], 5, first_block=40)),
    ]
    verdicts = run_in_process(verifier.verify(rows))
    assert model.thinned.num_passes == 5
    expected = [expected_tokens(model.thinned, row.request.token_ids, greedy(5)) for row in rows]
    assert [verdict.draft for verdict in verdicts] == [chain(expected[0][:3]), NO_DRAFT, chain(expected[2])]
    for row, verdict in zip(rows, verdicts, strict=True):
        tokens = row.request.token_ids
        assert verdict.token_ids == expected_tokens(model, tokens, greedy(len(verdict.token_ids)))


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 3])
def test_every_draft_has_the_length_that_was_asked_for_and_is_counted(length):
    """Four rounds, of drafts that are accepted whole, follow that of the prompt."""
    engine = make_engine(model_of(1), **SELF, num_speculative_tokens=length, block_size=4)
    run(engine, [(PROMPT, greedy(1 + 4 * (length + 1)))])
    stats = engine.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 4 * length, 4 * length)


def test_without_a_deferred_draft_nothing_is_drafted():
    model = model_of(2)
    verifier = make_verifier(model)
    row = prefilled(verifier, verify_row([1, 2, 3, 4], 0))
    (verdict,) = run_in_process(verifier.verify([row]))
    assert verdict.draft == NO_DRAFT
    assert model.thinned.num_passes == 0


def test_the_first_layers_keys_and_values_of_draft_tokens_are_those_that_the_target_computes(tmp_path):
    """So the draft reads what it would read if it were a model of its own with a cache of its own."""
    target = backend_of(save_llama(tmp_path, seed=1, layers=4))
    settings = {"drafting": "self", "self_draft_layers": 2}
    verifier = ModelVerifier(
        target, EngineConfig(num_blocks=80, block_size=4, **settings), None, METHODS["self"].make_in_target
    )
    row = prefilled(verifier, verify_row([5, 9, 2, 7, 30, 12], 4))
    with torch.inference_mode():
        (drafted,) = verifier._drafter.draft([row], decides=True)
    places = [verifier._kv.slot(row.block_ids, place) for place in range(5, 9)]
    before = [cache.flatten(0, 1)[places].clone() for cache in (*verifier._kv.keys, *verifier._kv.values)]
    run_in_process(verifier.verify([drafted]))
    after = [cache.flatten(0, 1)[places] for cache in (*verifier._kv.keys, *verifier._kv.values)]
    for layer in (0, 1, 4, 5):
        torch.testing.assert_close(before[layer], after[layer])
    for layer in (2, 3, 6, 7):
        assert not before[layer].any()
        assert after[layer].any()


class Rank(SelfDraftingModel):
    """A rank that notes what it shares; a later one is run afterwards, and adds what an earlier one shared."""

    def __init__(self, first=None):
        super().__init__(laws(1), laws(2))
        self.reducer = self.thinned.reducer = self
        self.first = first
        self.shared = []
        self.num_sums = 0

    def sum(self, partial):
        self.shared.append(partial.clone())
        self.num_sums += 1
        return partial if self.first is None else partial + self.first.shared[self.num_sums - 1]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_rank_that_does_not_decide_computes_the_tokens_that_the_first_rank_drew(verification):
    first = Rank()
    second = Rank(first)
    verifiers = [make_verifier(model, verification=verification) for model in (first, second)]
    params = SamplingParams(temperature=0.9, seed=3)
    rows = [verify_row([1, 2, 3, 4], 3, params=params), verify_row([0, 0, 3], 2, first_block=40, params=params)]
    verdicts = []
    for verifier, decides in zip(verifiers, (True, False), strict=True):
        for row in rows:
            prefilled(verifier, row)
        verdicts.append(run_in_process(verifier.verify(rows, decides=decides)))
    assert [len(verdict.draft.token_ids) for verdict in verdicts[0]] == [3, 2]
    assert verdicts[1] == []
    assert first.num_sums == second.num_sums == 3
    assert all(not partial.any() for partial in second.shared), "it adds nothing of its own"
    (entries, _), (others, _) = (verifier._kv.keys for verifier in verifiers)
    assert torch.equal(entries[1:], others[1:])
