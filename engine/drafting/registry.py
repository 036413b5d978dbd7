"""Drafting methods by their name in the configuration: how to make the drafter, and the process that runs it.

To add a method, write its file, and give it a line in `METHODS` and its name in `engine.config.Drafting`. A factory
imports the method's file when it is called: the Router asks where a method runs, and has no need of torch. A method
elsewhere is named by its import path: a `Method`, or a class of drafters for the Router, made of an `EngineConfig`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from engine.config import TREE_WIDTH, EngineConfig, import_named
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.predicted import PredictionCopier
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.errors import ConfigError
from engine.protocols import DeferringDrafter, Drafter, NoDrafter, TargetDrafter

if TYPE_CHECKING:
    from engine.execution.backend import Backend
    from engine.execution.kv_tensors import KVTensors
    from engine.sampling.grammar import Grammars

_CHAIN_RULES = ("coupled", "rejection", "block")

Process = Literal["router", "draft", "target"]
"""Where a method runs in a speculation group: with the committed tokens, in a draft worker, or with the target."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft.

    Attributes:
        runs_in: a method that runs in a draft worker is the one that loads a draft model.
        make: returns the drafter; the draft model is None for a method that loads none.
        proposes: False if no draft is ever made, so that nothing has to be reserved for one.
        in_front: returns the drafter that the engine calls instead of it, which may be in another process; None if the
            engine calls the drafter itself.
        drafts_trees: drafts may be trees, not only chains.
        rules: the verification rules that accept its drafts.
        runs_ahead: the rules that let a draft worker draft before the verdict is known.
        chain_rules: the rules that need trees of independent chains from the tip.
        reads_features: a head in the draft worker drafts, so the target's first rank sends it the target's features.
        make_in_target: of a method that runs in the target, returns the drafter that the verifier calls there, given
            the target's backend and its KV cache; the drafter of `make` then leaves every draft to it.
        drafts_with: the weights that it drafts with, if they are no draft model's: the trained head that `draft_model`
            names, the head in the target's checkpoint, or the target's first layers.
    """

    runs_in: Process
    make: Callable[[EngineConfig, DraftModel | None], Drafter]
    proposes: bool = True
    in_front: Callable[[EngineConfig, Drafter], Drafter] | None = None
    drafts_trees: bool = False
    rules: Collection[str] = _CHAIN_RULES
    runs_ahead: Collection[str] = ()
    chain_rules: Collection[str] = ()
    reads_features: bool = False
    make_in_target: "Callable[[EngineConfig, Backend, KVTensors, Grammars | None], TargetDrafter] | None" = None
    drafts_with: Literal["head", "target_head", "target_layers"] | None = None

    def drafter_of_engine(self, config: EngineConfig, drafter: Drafter) -> Drafter:
        """Return the drafter that the engine calls, given `make`'s drafter or a link to it.

        Around every method, it drafts from the predictions of requests that bring one.
        """
        if self.in_front is not None:
            drafter = self.in_front(config, drafter)
        return drafter if config.speculation == "off" else CombinedDrafter(drafter, PredictionCopier())

    def branches(self, config: EngineConfig, *, run_ahead: bool = False) -> tuple[int, ...]:
        """Return the possible tokens of a request in passes over trees, and in passes that run ahead."""
        from engine.drafting.run_ahead.passes import WIDTHS

        trees = range(2, 2 + config.num_speculative_tokens) if self.drafts_trees else ()
        return (*trees, *(WIDTHS if run_ahead else ()))


def _model_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.model.chain_drafter import ModelDrafter
    from engine.drafting.run_ahead.chains import RunAheadDrafter

    assert draft is not None
    return RunAheadDrafter(draft, config) if draft.run_ahead else ModelDrafter(draft, config)


def _tree_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.trees.run_ahead_trees import RunAheadTreeDrafter
    from engine.drafting.trees.sampled_tree import SampledTreeDrafter
    from engine.drafting.trees.tree_drafter import TreeDrafter
    from engine.verification.rule import rule_of

    assert draft is not None
    if rule_of(config.verification).needs_draft_rows:
        return SampledTreeDrafter(draft, config)
    return RunAheadTreeDrafter(draft, config) if draft.run_ahead else TreeDrafter(draft, config)


def _suffix_drafter(config: EngineConfig) -> SuffixDrafter:
    # With other rules a text depends on its drafts. A draft from the output of a request with the same seed would then
    # depend on the random numbers that decide about it, and the text would not have the target's distribution.
    remembers = config.enable_prefix_caching and config.verification == "coupled"
    return SuffixDrafter(remembers_outputs=remembers)


def _self_drafter(config: EngineConfig, target: "Backend", *state: Any) -> TargetDrafter:
    from engine.drafting.in_target.target_chains import TargetChainDrafter
    from engine.models.first_layers import first_layers

    assert config.self_draft_layers is not None
    return TargetChainDrafter(partial(first_layers, count=config.self_draft_layers), config, target, *state)


def _head_drafter(config: EngineConfig, target: "Backend", *state: Any) -> TargetDrafter:
    from engine.drafting.in_target.block_drafter import BlockDrafter
    from engine.drafting.in_target.target_chains import TargetChainDrafter
    from engine.heads.head import head_model

    if target.model.head is not None and target.model.head.drafts_blocks:
        return BlockDrafter(config, target, *state)
    return TargetChainDrafter(head_model, config, target, *state)


def _head_tree_drafter(config: EngineConfig, target: "Backend", *state: Any) -> TargetDrafter:
    from engine.drafting.trees.target_trees import TargetTreeDrafter
    from engine.heads.head import head_model

    return TargetTreeDrafter(head_model, config, target, *state)


_IN_TARGET = partial(Method, "target", lambda *_: DeferringDrafter())


METHODS: Mapping[str, Method] = {
    "none": Method("router", lambda *_: NoDrafter(), proposes=False),
    "model": Method("draft", _model_drafter, runs_ahead=_CHAIN_RULES),
    "tree": Method(
        "draft",
        _tree_drafter,
        drafts_trees=True,
        rules=("coupled", "rejection", "k_sequential"),
        runs_ahead=("coupled",),
        chain_rules=("k_sequential",),
    ),
    "self": _IN_TARGET(make_in_target=_self_drafter, drafts_with="target_layers"),
    "head": _IN_TARGET(make_in_target=_head_drafter, drafts_with="head"),
    "head_tree": _IN_TARGET(
        make_in_target=_head_tree_drafter, drafts_with="head", drafts_trees=True, rules=("coupled",)
    ),
    "head_worker": Method("draft", _model_drafter, runs_ahead=_CHAIN_RULES, reads_features=True, drafts_with="head"),
    "mtp": _IN_TARGET(make_in_target=_head_drafter, drafts_with="target_head"),
    "ngram": Method("router", lambda *_: NgramDrafter()),
    "suffix": Method("router", lambda config, _: _suffix_drafter(config)),
    "model+suffix": Method(
        "draft",
        _model_drafter,
        runs_ahead=_CHAIN_RULES,
        in_front=lambda config, model: CombinedDrafter(model, _suffix_drafter(config)),
    ),
}


def method_of(name: str) -> Method:
    """Return the method of a name in `METHODS` or of an import path; raise ConfigError if there is none.

    "auto" is "model" here; `settle` replaces it by what suits the pair.
    """
    if ":" not in name:
        return METHODS["model" if name == "auto" else name]
    made = import_named("drafting", name)
    if isinstance(made, Method):
        return made
    if not isinstance(made, type) or not hasattr(made, "propose"):
        raise ConfigError(f"drafting is {name!r}, which is {made!r}; it must be a class of drafters or a Method")

    def make(config: EngineConfig, _: DraftModel | None) -> Drafter:
        try:
            drafter: Drafter = made(config)
        except Exception as error:
            raise ConfigError(f"drafting is {name!r}, which cannot be made of an EngineConfig: {error!r}") from error
        return drafter

    return Method("router", make)


def num_tree_chains(config: EngineConfig) -> int:
    """Return how many chains from the tip a tree is; 1 if its nodes come the best first, 0 if drafts are no trees."""
    method = method_of(config.drafting)
    in_chains = config.verification in method.chain_rules
    return TREE_WIDTH if in_chains else int(method.drafts_trees)
