"""Trees level by level: a cache that keeps accepted nodes, and gives the blocks of others back."""

import random

import pytest

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.trees.tree_drafter import TreeDrafter
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import Counting, propose, row
from tests.engine.drafting.trees.test_tree_drafter import CONFIG, MODEL, PARAMS


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_proposals_do_not_depend_on_what_the_drafter_remembers(params):
    """Requests committing by chance: a path of a tree, off the first branch or not, none of it, longer gaps."""
    chance = random.Random(1)
    kept = TreeDrafter(DraftModel(MODEL), CONFIG)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(8)}
    off_the_chain = 0
    for _ in range(12):
        names = [name for name in texts if chance.random() < 0.7]
        rows = [row(texts[name], chance.randrange(1, 9), name=name, params=params) for name in names]
        drafts = propose(kept, *rows)
        fresh = TreeDrafter(DraftModel(MODEL), CONFIG)
        fresh._confidence = kept._confidence
        assert drafts == propose(fresh, *rows)
        for name, draft in zip(names, drafts, strict=True):
            path = chance.choice(paths(draft))
            off_the_chain += path != draft.token_ids[: len(path)]
            texts[name] += [*path, chance.randrange(2, VOCAB)]
        for name in texts.keys() - set(names):
            texts[name] += [chance.randrange(2, VOCAB) for _ in range(chance.choice([0, 1, 12]))]
    assert off_the_chain > 5


def test_accepted_nodes_are_not_computed_again():
    model = Counting(MODEL)
    drafter, text = TreeDrafter(DraftModel(model), CONFIG), [5, 9, 4, 2, 30]
    draft = propose(drafter, row(text, 12))[0]
    deepest = max(paths(draft), key=len)
    model.passes.clear()
    propose(drafter, row([*text, *deepest, 7], 12))
    assert len(deepest) > 2
    assert model.passes[0] <= 2, "the token after the path, and at most the last node, which has no children"


def test_rows_get_as_many_nodes_as_they_asked_for_and_blocks_come_back():
    drafter = TreeDrafter(DraftModel(MODEL), EngineConfig(num_blocks=30, block_size=4, drafting="tree"))
    free = len(drafter.cache.free_blocks)
    drafts = propose(drafter, *(row([4, 5, 6 + i], i, name=str(i)) for i in range(5)))
    assert [len(draft.token_ids) for draft in drafts] == [0, 1, 2, 3, 4]
    for i in range(5):
        drafter.release(str(i))
    assert len(drafter.cache.free_blocks) == free
    assert drafter.tree_of("a") is None


def test_a_request_that_was_evicted_while_it_was_away_gets_a_tree_again():
    drafter, text = TreeDrafter(DraftModel(MODEL), EngineConfig(num_blocks=6, block_size=4, drafting="tree")), [5, 9, 4]
    propose(drafter, row(text, name="away"))
    propose(drafter, row([3] * 16, name="other"))
    assert "away" not in drafter.cache.prefixes
    (draft,) = propose(drafter, row([*text, 7], name="away"))
    assert len(draft.token_ids) == 4
