"""Drafting methods by their name in the configuration: how to make the drafter, and the process that runs it.

To add a method, write its file, and give it a line in `METHODS` and its name in `engine.config.Drafting`. A factory
imports the method's file when it is called, because the Router needs no torch to ask where a method runs. A method
elsewhere is named by its import path: a `Method`, or a class of drafters for the Router, made of an `EngineConfig`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from engine.config import TREE_WIDTH, EngineConfig, import_named
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.predicted import PredictionCopier
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.several import SeveralDrafters
from engine.errors import ConfigError
from engine.protocols import DeferringDrafter, Drafter, NoDrafter, TargetDrafter

if TYPE_CHECKING:
    from engine.execution.backend import Backend
    from engine.execution.kv_tensors import KVTensors
    from engine.sampling.grammar import Grammars

_CHAIN_RULES = ("coupled", "rejection", "block")

Process = Literal["router", "draft", "target"]
"""Where a method runs: in the Router, in a draft worker, or in the target's process."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft.

    Attributes:
        make: returns the drafter; the draft model is None for a method that loads none.
        in_front: wraps the drafter, or a link to it, for the engine; None if the engine calls it directly.
        make_in_target: returns the verifier's drafter in the target; `make`'s drafter then defers every draft to it.
        drafts_with: `draft_model`'s head, the head in the target's checkpoint, or the target's first layers.
    """

    runs_in: Process  # only methods in a draft worker load a draft model
    make: Callable[[EngineConfig, DraftModel | None], Drafter]
    proposes: bool = True  # False if no draft is ever made
    in_front: Callable[[EngineConfig, Drafter], Drafter] | None = None
    drafts_trees: bool = False
    rules: Collection[str] = _CHAIN_RULES  # verification rules that accept the drafts
    runs_ahead: Collection[str] = ()  # rules that allow run-ahead
    chain_rules: Collection[str] = ()  # rules whose trees must be independent chains from the tip
    reads_features: bool = False  # a head in the draft worker drafts, and the target sends features
    make_in_target: "Callable[[EngineConfig, Backend, KVTensors, Grammars | None], TargetDrafter] | None" = None
    drafts_with: Literal["head", "target_head", "target_layers"] | None = None

    def drafter_of(self, config: EngineConfig, drafts: Sequence[DraftModel]) -> Drafter:
        """Return a drafter of these models, one or several; of no model, if the method loads none."""
        if len(drafts) > 1:
            return SeveralDrafters([self.make(config, draft) for draft in drafts])
        return self.make(config, drafts[0] if drafts else None)

    def drafter_of_engine(self, config: EngineConfig, drafter: Drafter) -> Drafter:
        """Return the drafter that the engine calls, given `make`'s drafter or a link; it copies predictions, too."""
        if self.in_front is not None:
            drafter = self.in_front(config, drafter)
        return drafter if config.speculation == "off" else CombinedDrafter(drafter, PredictionCopier())

    def branches(self, config: EngineConfig, *, run_ahead: bool = False) -> tuple[int, ...]:
        """Return how many tokens a request may have in passes over trees, and in run-ahead passes."""
        from engine.drafting.run_ahead.passes import WIDTHS

        trees = range(2, 2 + config.num_speculative_tokens) if self.drafts_trees else ()
        return (*trees, *(WIDTHS if run_ahead else ()))


def _model_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.model.chain_drafter import ModelDrafter
    from engine.drafting.run_ahead.chains import RunAheadDrafter

    assert draft is not None
    return RunAheadDrafter(draft, config) if draft.run_ahead else ModelDrafter(draft, config)


def _head_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.model.block_model_drafter import BlockModelDrafter

    assert draft is not None
    return BlockModelDrafter(draft, config) if draft.backend.model.drafts_blocks else _model_drafter(config, draft)


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


def _target_drafter(config: EngineConfig, target: "Backend", *state: Any, trees: bool = False) -> TargetDrafter:
    from engine.heads.head import head_model
    from engine.models.first_layers import first_layers

    count = config.self_draft_layers
    part = head_model if count is None else partial(first_layers, count=count)
    chains = "in_target.block_drafter:BlockDrafter"
    if not target.model.drafts_blocks:
        chains = "in_target.target_chains:TargetChainDrafter"
    path = f"engine.drafting.{'trees.target_trees:TargetTreeDrafter' if trees else chains}"
    drafter: TargetDrafter = import_named("drafting", path)(part, config, target, *state)
    return drafter


_IN_TARGET = partial(Method, "target", lambda *_: DeferringDrafter(), make_in_target=_target_drafter)


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
    "self": _IN_TARGET(drafts_with="target_layers"),
    "head": _IN_TARGET(drafts_with="head"),
    "head_tree": _IN_TARGET(
        make_in_target=partial(_target_drafter, trees=True), drafts_with="head", drafts_trees=True, rules=("coupled",)
    ),
    "head_worker": Method("draft", _head_drafter, runs_ahead=_CHAIN_RULES, reads_features=True, drafts_with="head"),
    "mtp": _IN_TARGET(drafts_with="target_head"),
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
    """Return the method of a name ("auto" as "model") or an import path; raise ConfigError if there is none."""
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
