"""Drafting methods by their name in the configuration: how to make the drafter, and the process that runs it.

To add a method, write its file, and give it a line in `METHODS` and its name in `engine.config.Drafting`. A factory
imports the method's file when it is called: the Router asks where a method runs, and has no need of torch. A method
elsewhere is named by its import path: a `Method`, or a class of drafters for the Router, made of an `EngineConfig`.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.config import TREE_WIDTH, EngineConfig, ModelConfig, PairConfig, import_named
from engine.control.survival import Prior
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.predicted import PredictionCopier
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.errors import ConfigError, ModelError, ModelMismatchError
from engine.heads.config import BLOCK_KINDS, kind_of, verifier_of
from engine.models.registry import open_model
from engine.models.source import ModelSource
from engine.protocols import DeferringDrafter, Drafter, NoDrafter, TargetDrafter

if TYPE_CHECKING:
    from engine.execution.backend import Backend
    from engine.execution.kv_tensors import KVTensors
    from engine.sampling.grammar import Grammars

logger = logging.getLogger(__name__)

_CHAIN_RULES = ("coupled", "rejection", "block")
_HEAD_METHODS = ("head", "head_tree", "head_worker")
"""The methods whose draft model is a trained head; that of "mtp" is in the target's checkpoint."""

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
    from engine.drafting.trees.target_trees import TargetTreeDrafter
    from engine.heads.head import head_model

    if drafts_trees(config.drafting):
        return TargetTreeDrafter(head_model, config, target, *state)
    if target.model.head is not None and target.model.head.drafts_blocks:
        return BlockDrafter(config, target, *state)
    return TargetChainDrafter(head_model, config, target, *state)


def _in_target(make: Callable[..., TargetDrafter]) -> Method:
    return Method("target", lambda *_: DeferringDrafter(), make_in_target=make)


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
    "self": _in_target(_self_drafter),
    "head": _in_target(_head_drafter),
    "head_tree": replace(_in_target(_head_drafter), drafts_trees=True, rules=("coupled",)),
    "head_worker": Method("draft", _model_drafter, runs_ahead=_CHAIN_RULES, reads_features=True),
    "mtp": _in_target(_head_drafter),
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
    """Return the method of a name in `METHODS` or of an import path; raise ConfigError if there is none."""
    if ":" not in name:
        return METHODS[name]
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


def drafts_trees(name: str) -> bool:
    """Return whether drafts of a method may be trees; drafts of "auto" never are."""
    return name != "auto" and method_of(name).drafts_trees


def acceptance_of(config: EngineConfig) -> Prior:
    """Return how likely draft tokens are accepted before anything is known, for a configuration's kind of drafts."""
    if not drafts_trees(config.drafting):
        return Prior.of(config.num_speculative_tokens)
    in_chains = config.verification in method_of(config.drafting).chain_rules
    return Prior.of(config.num_speculative_tokens, (config.tree_width or TREE_WIDTH) if in_chains else 1)


def choose_method(config: EngineConfig, *, has_draft_model: bool) -> Method:
    """Return the method that `config.drafting` names; if speculation is off, the method "none".

    "auto" is "model" if there is a draft model, else "suffix".

    Raises:
        ConfigError: the method needs a draft model, and there is none; or two settings do not fit each other.
    """
    name = config.drafting
    if config.tree_width is not None and not drafts_trees(name):
        raise ConfigError(f"tree_width is {config.tree_width}, but drafting is {name!r}, which drafts no trees")
    if name == "auto":
        name = "model" if has_draft_model else "suffix"
    method = method_of(name)
    if name == "self" and config.self_draft_layers is None:
        raise ConfigError(f"drafting is {name!r}, which needs self_draft_layers")
    if name != "self" and config.self_draft_layers is not None:
        problem = f"drafting is {config.drafting!r}, which does not draft with the target's layers"
        raise ConfigError(f"self_draft_layers is set, but {problem}")
    if not config.max_draft_tokens:
        return METHODS["none"]
    if method.runs_in == "draft" and not has_draft_model:
        raise ConfigError(f"drafting is {name!r}, which needs a draft_model, and there is none")
    if ":" in config.verification:
        from engine.verification.rule import rule_of

        rule_of(config.verification)  # here, so that a wrong path is an error of the start
    elif method.proposes and config.verification not in method.rules:
        rules = " or ".join(method.rules)
        raise ConfigError(f"verification is {config.verification!r}, but drafting is {name!r}, which allows {rules}")
    return method


def check_run_ahead(config: EngineConfig, run_ahead: str, *, has_draft_model: bool) -> None:
    """Raise ConfigError if `run_ahead` is "on" but the method cannot draft before the verdict is known."""
    method = choose_method(config, has_draft_model=has_draft_model)
    if run_ahead == "on" and method.proposes and config.verification not in method.runs_ahead:
        methods = f"drafting is {config.drafting!r} and verification {config.verification!r}"
        raise ConfigError(f"run_ahead is on, but {methods}: then drafts are made only after the verdict is known")


def check_kinds(target: ModelSource, draft: ModelSource | None, method: Method) -> None:
    """Check that target and draft are of one kind, and that models of this kind can draft so.

    A warning tells if a head was trained for another target; those of its sizes are served.

    Raises:
        ModelMismatchError: they are of different kinds.
        ModelError: there is no such model, or the method does not fit.
    """
    if (head := target.head) is not None:
        target.refuse("heads")
        if kind_of(head.settings) in BLOCK_KINDS and (method.drafts_trees or method.reads_features):
            raise ModelError(f"the head {head.path} drafts blocks, as only drafting=head can")
        verifier = PairConfig(target_model=verifier_of(head.settings) or target.path).target.path
        if Path(verifier).name != Path(target.path).name:
            logger.warning("the head %s was trained for %s; the target is %s", head.path, verifier, target.path)
    elif draft is not None and kind_of(draft.settings):
        raise ModelError(f"{draft.path} is a trained head; drafting must be {', '.join(_HEAD_METHODS)}")
    elif draft is not None and draft.kind.name != target.kind.name:
        kinds = f"the target {target.path} is {target.kind.name}, the draft {draft.path} is {draft.kind.name}"
        raise ModelMismatchError(f"{kinds}; both must be of the same kind")
    if method.drafts_trees:
        target.refuse("trees")
        if draft is not None and method.runs_in == "draft":
            draft.refuse_to_draft("trees")
    if method.runs_in == "target":
        target.refuse("self-drafts")


class Settled(NamedTuple):
    """What a pair's settings come to: the models to load, and the engine's settings."""

    target: ModelConfig
    draft: ModelConfig | None
    engine: EngineConfig


def settle_drafting(pair: PairConfig) -> Settled:
    """Return the target with its head, the draft model to load, if any, and the settings; see `choose_method`.

    Whether the draft model is a trained head is known by its config.json; where that is not, `drafting` has to say it.
    If the method makes no drafts, they have k = 0. If none are wanted, speculation is off, so that not even predictions
    are drafted from.

    Raises:
        ConfigError: two settings do not fit each other.
    """
    draft, model = pair.draft, f"draft_model is {pair.draft_model!r}"
    settings = _settings_of(draft)
    has_head = kind_of(settings) is not None
    if has_head and pair.drafting == "auto":
        pair = replace(pair, drafting="head")
    drafting, needs_head = pair.drafting, pair.drafting in _HEAD_METHODS
    method = choose_method(pair.engine, has_draft_model=draft is not None)
    if needs_head and (draft is None or (settings and not has_head)):
        raise ConfigError(f"drafting is {drafting!r}, but {model}, which is no trained head")
    if has_head and not needs_head and method.runs_in == "draft":
        raise ConfigError(f"{model}, which is a trained head, but drafting is {drafting!r}, which needs a whole model")
    if method.runs_in == "target" and not needs_head and pair.draft_model not in ("auto", "none"):
        raise ConfigError(f"{model}, but drafting is {drafting!r}, which uses none")
    if has_head or needs_head:
        if pair.draft_quantization != "none":
            raise ConfigError(f"draft_quantization is {pair.draft_quantization}, but the draft is a trained head")
        if pair.target_model == "auto":
            if (target_model := verifier_of(settings)) is None:
                problem = "do not name its target" if settings else "are not here (`paceline pull` downloads them)"
                raise ConfigError(f"{model}, a trained head whose files {problem}; set target_model")
            pair = replace(pair, target_model=target_model)
    target = pair.target
    if method.runs_in != "router" and (head := draft if needs_head else target if drafting == "mtp" else None):
        target = replace(target, head="@".join(filter(None, (head.path, head.revision))))
    speculation = pair.speculation if pair.num_speculative_tokens else "off"
    k = pair.num_speculative_tokens if method.proposes else 0
    engine = replace(pair.engine, num_speculative_tokens=k, speculation=speculation)
    if method.reads_features:
        draft = replace(target, head_only=True)
    return Settled(target, draft if method.runs_in == "draft" else None, engine)


def _settings_of(model: ModelConfig | None) -> Mapping[str, Any]:
    """Return a model's config.json; empty if it is not on this machine."""
    try:
        return {} if model is None else open_model(model).settings
    except ModelError:
        return {}
