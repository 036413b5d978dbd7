"""The model drafter's cache: whatever it held before, it proposes what a fresh one would."""

import random

import pytest
import torch
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.trees.tree_drafter import TreeDrafter
from engine.params import SamplingParams
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import GREEDY, PARAMS, Counting, context_model, propose, row
from tests.engine.tiny import SIZES, backend_of, save
from tests.fakes import ContextModel, LateModel

CONFIG = EngineConfig(num_blocks=1000, block_size=4, max_num_batched_tokens=24)


@pytest.mark.parametrize("drafter", [ModelDrafter, TreeDrafter])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_proposals_do_not_depend_on_what_the_drafter_remembers(drafter, params, draft):
    """Ten requests committing by chance: all, some or none of a draft, rounds without one, longer gaps."""
    chance, model = random.Random(1), draft if drafter is ModelDrafter else context_model(1)
    kept = drafter(DraftModel(model), CONFIG)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(10)}
    for _ in range(12):
        names = [name for name in texts if chance.random() < 0.7]
        rows = [row(texts[name], chance.randrange(1, 9), name=name, params=params) for name in names]
        drafts, fresh = propose(kept, *rows), drafter(DraftModel(model), CONFIG)
        fresh._confidence = getattr(kept, "_confidence", None)  # what is learned of scores changes the shape of trees
        assert drafts == propose(fresh, *rows)
        for name, proposed in zip(names, drafts, strict=True):
            texts[name] += [*chance.choice(paths(proposed)), chance.randrange(2, VOCAB)]
        for name in texts.keys() - set(names):
            texts[name] += [chance.randrange(2, VOCAB) for _ in range(chance.choice([0, 1, 12]))]


def test_k_tokens_take_k_passes_once_the_context_is_computed(draft):
    model = Counting(draft)
    drafter, text = ModelDrafter(DraftModel(model), CONFIG), list(range(2, 60))
    first = propose(drafter, row(text, 4))[0].token_ids
    assert max(model.passes) <= CONFIG.max_num_batched_tokens
    assert sum(model.passes) == len(text) + 3
    model.passes.clear()
    propose(drafter, row([*text, *first, 7], 4))
    # The last draft token was never computed: it and the bonus token are caught up together.
    assert model.passes == [2, 1, 1, 1]
    model.passes.clear()
    propose(drafter, row([*text, *first, 7, 9], 4))
    assert model.passes == [1, 1, 1, 1]


def test_a_full_context_gets_no_draft(draft):
    drafter = ModelDrafter(DraftModel(draft), EngineConfig(num_blocks=300, block_size=4))
    limit = draft.info.max_model_len
    fits, too_long = propose(drafter, row([3] * (limit - 2), 2), row([3] * (limit - 1), 2, name="b"))
    assert len(fits.token_ids) == 2
    assert too_long.token_ids == []


def test_a_full_cache_evicts_requests_that_are_not_in_the_batch(draft):
    drafter = ModelDrafter(DraftModel(draft), EngineConfig(num_blocks=6, block_size=4))
    free = len(drafter.cache.free_blocks)
    propose(drafter, row([3] * 10, 2, name="old"))
    both = propose(drafter, row([4] * 10, 2, name="new"), row([5] * 10, 2, name="newer"))
    assert [len(d.token_ids) for d in both] == [2, 2]
    third = propose(drafter, row([4] * 10, 2, name="new"), row([5] * 10, 2, name="newer"), row([6] * 10, 2))[2]
    assert third.token_ids == []
    for name in ("old", "new", "newer", "a", "never seen"):
        drafter.release(name)
    assert len(drafter.cache.free_blocks) == free


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory):
    path = save(LlamaConfig(**{**SIZES, "vocab_size": 60}), tmp_path_factory.mktemp("small"), seed=4)
    return backend_of(path)


def test_a_draft_with_fewer_ids_than_the_target_passes_on_texts_it_cannot_read(small_vocabulary):
    """Families pad their vocabularies differently; one prompt must not take the drafter down."""
    drafter = ModelDrafter(DraftModel(small_vocabulary, token_limit=VOCAB), CONFIG)
    params = SamplingParams(
        seed=1, presence_penalty=1.0, repetition_penalty=1.2, logit_bias={63: 50.0}, stop_token_ids=[62], min_tokens=5
    )
    readable, not_readable = propose(
        drafter, row([4, 5, 6], 3, params=params), row([4, 63, 6], 3, name="b", params=params)
    )
    assert len(readable.token_ids) == 3
    assert max(readable.token_ids) < 60
    assert not_readable.token_ids == []


def test_ids_beyond_the_targets_are_never_drafted(draft):
    drafter = ModelDrafter(DraftModel(draft, token_limit=10), CONFIG)
    drafts = propose(
        drafter, *(row([4, 5, i], 4, name=str(i), params=SamplingParams(seed=i, temperature=5.0)) for i in range(10))
    )
    assert max(token for d in drafts for token in d.token_ids) < 10


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(params):
    laws = (3 * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(1))).softmax(-1)
    rows = [row([5, 9, 4], 4, params=params), row([7, 7, 2, 8], 3, name="b", params=params)]
    model, late = ContextModel(laws), LateModel(ContextModel(laws))
    assert propose(ModelDrafter(DraftModel(late), CONFIG), *rows) == propose(
        ModelDrafter(DraftModel(model), CONFIG), *rows
    )
    assert late.num_under_way == 4, "no pass but the last is waited for"
