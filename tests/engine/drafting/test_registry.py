"""The registry of drafting methods: where each runs, and what it makes."""

from dataclasses import replace
from typing import get_args

import pytest

from engine.config import Drafting, EngineConfig, PairConfig
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.registry import METHODS, DraftModel, Method, method_of
from engine.drafting.settle import settle
from engine.errors import ConfigError
from engine.llm import run_in_process
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, NoDrafter, ProposeRow, Request, chain
from tests.engine.drafting.run_ahead.test_run_ahead import MODEL
from tests.examples.drafter import BigramDrafter


def test_the_configuration_offers_the_methods_of_the_registry():
    assert get_args(Drafting) == ("auto", *METHODS)
    assert EngineConfig().drafting == "auto"


def test_copies_stand_in_front_of_a_model_wherever_that_runs():
    method, config = METHODS["model+suffix"], EngineConfig(num_blocks=10)
    model = method.make(config, DraftModel(MODEL, 4))
    assert type(model) is ModelDrafter
    outer = method.drafter_of_engine(config, model)
    assert (type(outer), type(outer.drafter), outer.drafter.drafter) == (CombinedDrafter, CombinedDrafter, model)


@pytest.mark.parametrize("name", METHODS)
def test_predictions_stand_in_front_of_every_method_unless_speculation_is_off(name):
    drafter = NoDrafter()
    if METHODS[name].in_front is None:
        assert METHODS[name].drafter_of_engine(EngineConfig(), drafter).drafter is drafter
    plain = METHODS["none"].drafter_of_engine(settle(PairConfig(num_speculative_tokens=0)).engine, drafter)
    assert plain is METHODS["none"].drafter_of_engine(EngineConfig(speculation="off"), drafter) is drafter
    undrafted = settle(PairConfig(drafting="none")).engine
    assert (undrafted.num_speculative_tokens, undrafted.speculation) == (0, "adaptive")


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [({}, True), ({"verification": "rejection"}, False), ({"enable_prefix_caching": False}, False)],
)
def test_suffixes_draft_from_earlier_outputs_only_where_no_draft_changes_the_text(settings, is_shared):
    drafter = METHODS["suffix"].make(EngineConfig(**settings), None)
    first, second = (Request(name, list(range(20)), 0, SamplingParams()) for name in ("a", "b"))
    second = replace(second, token_ids=list(range(10)))
    run_in_process(drafter.propose([ProposeRow(first, 4)]))
    drafter.release("a")
    [draft] = run_in_process(drafter.propose([ProposeRow(second, 2)]))
    assert draft == (chain([10, 11]) if is_shared else NO_DRAFT)


DIRECT = Method("draft", lambda config, draft: NoDrafter(), rules=("block",))


def test_a_method_elsewhere_is_named_by_its_import_path():
    config = EngineConfig(drafting="tests.examples.drafter:BigramDrafter", verification="tests.examples.rule:RULE")
    method = method_of(config.drafting)
    assert (method.runs_in, type(method.make(config, None))) == ("router", BigramDrafter)
    assert method_of(f"{__name__}:DIRECT") is DIRECT


def test_a_drafter_that_cannot_be_made_is_named():
    config = EngineConfig(drafting="engine.drafting.copying.combined:CombinedDrafter")
    method = method_of(config.drafting)
    with pytest.raises(ConfigError, match="CombinedDrafter', which cannot be made of an EngineConfig: TypeError"):
        method.make(config, None)
