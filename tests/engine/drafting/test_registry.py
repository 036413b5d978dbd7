"""The registry of drafting methods: where each runs, and what it makes."""

from dataclasses import replace
from typing import get_args

import pytest

from engine.config import Drafting, EngineConfig, PairConfig
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.in_target.target_chains import TargetChainDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.registry import METHODS, DraftModel, Method, method_of, num_tree_chains
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.drafting.settle import check_run_ahead, settle
from engine.drafting.trees.run_ahead_trees import RunAheadTreeDrafter
from engine.drafting.trees.sampled_tree import SampledTreeDrafter
from engine.drafting.trees.tree_drafter import TreeDrafter
from engine.errors import ConfigError
from engine.llm import run_in_process
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, DeferringDrafter, NoDrafter, ProposeRow, Request, chain
from tests.engine.drafting.run_ahead.test_chains import MODEL
from tests.examples.drafter import BigramDrafter
from tests.fakes import SelfDraftingModel


def test_the_configuration_offers_the_methods_of_the_registry():
    assert get_args(Drafting) == ("auto", *METHODS)
    assert EngineConfig().drafting == "auto"


@pytest.mark.parametrize(
    ("settings", "num_chains"),
    [
        ({"drafting": "model"}, 0),
        ({"drafting": "head_tree"}, 1),
        ({"drafting": "tree", "verification": "rejection"}, 1),
        ({"drafting": "tree", "verification": "k_sequential"}, 3),
        ({"drafting": "tests.examples.drafter:BigramDrafter"}, 0),
    ],
)
def test_what_is_learned_of_drafts_fits_their_form(settings, num_chains):
    assert num_tree_chains(EngineConfig(num_speculative_tokens=4, **settings)) == num_chains


@pytest.mark.parametrize(
    ("drafting", "verification", "run_ahead", "expected"),
    [
        ("model", "coupled", False, ModelDrafter),
        ("model", "rejection", True, RunAheadDrafter),
        ("tree", "coupled", False, TreeDrafter),
        ("tree", "coupled", True, RunAheadTreeDrafter),
        ("tree", "rejection", False, SampledTreeDrafter),
        ("tree", "k_sequential", False, SampledTreeDrafter),
    ],
)
def test_a_drafter_suits_its_rule_and_runs_ahead_if_its_worker_calls_advance(
    drafting, verification, run_ahead, expected
):
    config = EngineConfig(num_blocks=10, drafting=drafting, verification=verification)
    drafter = METHODS[drafting].make(config, DraftModel(MODEL, 4, run_ahead=run_ahead))
    assert type(drafter) is expected
    row = ProposeRow(Request("a", [1, 2], 1, SamplingParams(temperature=9.0, seed=1, ignore_eos=True)), 3)
    [draft] = run_in_process(drafter.propose([row]))
    assert len(draft.token_ids) == 3
    assert max(draft.token_ids) < 4
    assert (draft.top_ids is None) == (verification == "coupled")


def test_the_self_method_leaves_drafts_to_the_target_and_makes_a_drafter_there():
    method, config = METHODS["self"], EngineConfig(num_blocks=10, drafting="self", self_draft_layers=1)
    assert (method.runs_in, method.proposes) == ("target", True)
    assert type(method.make(config, None)) is DeferringDrafter
    target = SelfDraftingModel(MODEL.laws, MODEL.laws)
    drafter = method.make_in_target(config, target, target.allocate_kv(10, 16), None)
    assert type(drafter) is TargetChainDrafter
    assert drafter._backend is target.thinned
    in_target = [name for name, method in METHODS.items() if method.make_in_target is not None]
    assert in_target == ["self", "head", "head_tree", "mtp"]
    with pytest.raises(ConfigError, match="run_ahead is on, but drafting is 'self'"):
        check_run_ahead(config, "on")


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


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_methods_that_copy_run_in_the_router_without_a_model(name):
    method = METHODS[name]
    assert (method.runs_in, method.proposes) == ("router", True)
    row = ProposeRow(Request("a", [1, 2, 3, 1, 2], 5, SamplingParams()), 1)
    assert run_in_process(method.make(EngineConfig(), None).propose([row])) == [chain([3])]


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
