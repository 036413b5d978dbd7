"""Several drafts in one process: every row by the draft that it names."""

from dataclasses import replace

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.several import SeveralDrafters
from engine.drafting.registry import METHODS
from tests.engine.drafting.proposing import context_model, propose, row

CONFIG = EngineConfig(num_blocks=100, num_speculative_tokens=4)
MODELS = [DraftModel(context_model(seed)) for seed in range(3)]


def test_each_row_is_drafted_by_the_draft_that_it_names_and_in_its_place():
    several = METHODS["model"].drafter_of(CONFIG, MODELS)
    assert isinstance(several, SeveralDrafters)
    indices = [2, 0, 2, 0, 0]
    for length in (9, 11):  # from the start, and from what is cached
        rows = [
            replace(row(range(2, 2 + length + place), name=str(place)), draft_index=index)
            for place, index in enumerate(indices)
        ]
        alone = [propose(ModelDrafter(MODELS[each.draft_index], CONFIG), each)[0] for each in rows]
        assert propose(several, *rows) == alone
        assert len({tuple(draft.token_ids) for draft in alone}) > 1


def test_a_request_that_ends_leaves_every_draft():
    drafters = [ModelDrafter(model, CONFIG) for model in MODELS]
    several = SeveralDrafters(drafters)
    for index in range(3):
        propose(several, replace(row(range(2, 9)), draft_index=index))
    assert all(drafter.cache.prefixes for drafter in drafters)
    several.release("a")
    assert not any(drafter.cache.prefixes for drafter in drafters)


def test_a_single_draft_needs_no_choice():
    assert isinstance(METHODS["model"].drafter_of(CONFIG, MODELS[:1]), ModelDrafter)
