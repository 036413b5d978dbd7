"""Drafting methods by their name in the configuration: who makes the drafter, and in which process it runs.

To add a method, write its file, and give it a line in `METHODS` and its name in `engine.config.Drafting`. A factory
imports the method's file when it is called: the Router asks where a method runs, and has no need of torch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engine.acceptance import Acceptance, ChainAcceptance, TreeAcceptance
from engine.config import EngineConfig, ModelConfig, PairConfig
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.nodes import WIDTH
from engine.drafting.skip_list import check_names
from engine.errors import ConfigError, ModelError, ModelMismatchError
from engine.models.family import is_encoder_decoder
from engine.protocols import DeferringDrafter, Drafter, NoDrafter, TargetDrafter

if TYPE_CHECKING:
    from engine.execution.attention import KVTensors
    from engine.execution.backend import Backend
    from engine.sampling.grammar import Grammars

_CHAIN_RULES = ("coupled", "rejection", "block")

Process = Literal["router", "draft", "target"]
"""Where a method runs in a speculation group: with the committed tokens, in a draft worker, or with the target."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model, and what its drafter must know beside it.

    Attributes:
        token_limit: the target's vocabulary size; ids beyond it are never drafted.
        run_ahead: the worker calls `advance` between two proposals, so that drafting goes on meanwhile.
    """

    backend: "Backend"
    token_limit: int
    grammars: "Grammars | None" = None
    run_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft.

    Attributes:
        make: returns the drafter; the draft model is None for a method that loads none.
        proposes: False where no draft is ever made, so that nothing has to be reserved for one.
        loads_model: the method needs a draft model.
        in_front: returns what the engine calls in place of the drafter, which may be in another process; None if the
            engine calls the drafter itself.
        drafts_trees: drafts may be trees, not only chains.
        rules: the verification rules that its drafts can be verified by.
        runs_ahead: those of them for which, in a draft worker, it can draft for verdicts that it does not know yet.
        chain_rules: those of them for which its trees are independent chains from the tip.
        make_in_target: of a method that runs in the target, returns the drafter that the verifier calls there, given
            the target's backend and its KV cache; what `make` returns then leaves every draft to it.
    """

    runs_in: Process
    make: Callable[[EngineConfig, DraftModel | None], Drafter]
    proposes: bool = True
    loads_model: bool = False
    in_front: Callable[[EngineConfig, Drafter], Drafter] | None = None
    drafts_trees: bool = False
    rules: Collection[str] = _CHAIN_RULES
    runs_ahead: Collection[str] = ()
    chain_rules: Collection[str] = ()
    make_in_target: "Callable[[EngineConfig, Backend, KVTensors, Grammars | None], TargetDrafter] | None" = None

    def can_run_ahead(self, config: EngineConfig) -> bool:
        """Return whether the method can draft for verdicts that it does not know yet, for a configuration's rule."""
        return config.verification in self.runs_ahead

    def drafter_of_engine(self, config: EngineConfig, drafter: Drafter) -> Drafter:
        """Return what the engine calls for this method, given the drafter that `make` made, or a link to it."""
        return drafter if self.in_front is None else self.in_front(config, drafter)


def _no_drafter(_config: EngineConfig, _draft: DraftModel | None) -> Drafter:
    return NoDrafter()


def _model_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.model import ModelDrafter
    from engine.drafting.run_ahead.drafter import RunAheadDrafter

    assert draft is not None
    drafter_class = RunAheadDrafter if draft.run_ahead else ModelDrafter
    return drafter_class(draft.backend, config, token_limit=draft.token_limit, grammars=draft.grammars)


def _ngram_drafter(_config: EngineConfig, _draft: DraftModel | None) -> Drafter:
    return NgramDrafter()


def _suffix_drafter(config: EngineConfig, _draft: DraftModel | None) -> SuffixDrafter:
    # With other rules a text depends on its drafts. A draft from the output of a request with the same seed would then
    # depend on the random numbers that decide about it, and the text would not have the target's distribution.
    remembers = config.enable_prefix_caching and config.verification == "coupled"
    return SuffixDrafter(remembers_outputs=remembers)


def _with_copies(config: EngineConfig, drafter: Drafter) -> Drafter:
    return CombinedDrafter(drafter, _suffix_drafter(config, None))


def _tree_drafter(config: EngineConfig, draft: DraftModel | None) -> Drafter:
    from engine.drafting.run_ahead.trees import RunAheadTreeDrafter
    from engine.drafting.sampled_tree import SampledTreeDrafter
    from engine.drafting.tree import TreeDrafter
    from engine.verification.rule import RULES

    assert draft is not None
    drafter_class: type[TreeDrafter | SampledTreeDrafter]
    if RULES[config.verification].needs_draft_rows:
        drafter_class = SampledTreeDrafter
    else:
        drafter_class = RunAheadTreeDrafter if draft.run_ahead else TreeDrafter
    return drafter_class(draft.backend, config, token_limit=draft.token_limit, grammars=draft.grammars)


def _deferring_drafter(_config: EngineConfig, _draft: DraftModel | None) -> Drafter:
    return DeferringDrafter()


def _self_drafter(
    config: EngineConfig, target: "Backend", kv: "KVTensors", grammars: "Grammars | None"
) -> TargetDrafter:
    from engine.drafting.self_draft import SelfDrafter

    return SelfDrafter(config, target, kv, grammars)


METHODS: Mapping[str, Method] = {
    "none": Method("router", _no_drafter, proposes=False),
    "model": Method("draft", _model_drafter, loads_model=True, runs_ahead=_CHAIN_RULES),
    "tree": Method(
        "draft",
        _tree_drafter,
        loads_model=True,
        drafts_trees=True,
        rules=("coupled", "rejection", "k_sequential"),
        runs_ahead=("coupled",),
        chain_rules=("k_sequential",),
    ),
    "self": Method("target", _deferring_drafter, make_in_target=_self_drafter),
    "ngram": Method("router", _ngram_drafter),
    "suffix": Method("router", _suffix_drafter),
    "model+suffix": Method("draft", _model_drafter, loads_model=True, runs_ahead=_CHAIN_RULES, in_front=_with_copies),
}


def drafts_trees(name: str) -> bool:
    """Return whether drafts of a method may be trees; those of "auto" never are."""
    return name in METHODS and METHODS[name].drafts_trees


def acceptance_of(config: EngineConfig) -> Acceptance:
    """Return what learns how many tokens of a configuration's drafts are accepted, by their length."""
    if not drafts_trees(config.drafting):
        return ChainAcceptance(config.num_speculative_tokens)
    in_chains = config.verification in METHODS[config.drafting].chain_rules
    return TreeAcceptance(config.num_speculative_tokens, (config.tree_width or WIDTH) if in_chains else 1)


def choose_method(config: EngineConfig, *, has_draft_model: bool) -> Method:
    """Return the method that `config.drafting` names; if speculation is off, the method "none".

    "auto" is "model" if there is a draft model, else "suffix".

    Raises:
        ConfigError: the method needs a draft model, and there is none; or two settings do not fit each other.
    """
    name = config.drafting
    _check_layers(config)
    if config.tree_width is not None and not drafts_trees(name):
        raise ConfigError(f"tree_width is {config.tree_width}, but drafting is {name!r}, which drafts no trees")
    if name == "auto":
        name = "model" if has_draft_model else "suffix"
    if config.num_speculative_tokens == 0 or config.speculation == "off":
        return METHODS["none"]
    if METHODS[name].loads_model and not has_draft_model:
        raise ConfigError(f"drafting is {name!r}, which needs a draft_model, and there is none")
    if METHODS[name].proposes and config.verification not in METHODS[name].rules:
        rules = " or ".join(METHODS[name].rules)
        raise ConfigError(f"verification is {config.verification!r}, but drafting is {name!r}, which allows {rules}")
    return METHODS[name]


def _check_layers(config: EngineConfig) -> None:
    """Refuse layers of the target for a method that does not draft with them, and that method without them."""
    runs_in_target = config.drafting in METHODS and METHODS[config.drafting].runs_in == "target"
    choices = {"self_draft_layers": config.self_draft_layers, "self_draft_skip": config.self_draft_skip}
    made = [name for name, choice in choices.items() if choice is not None]
    if made and not runs_in_target:
        raise ConfigError(
            f"{made[0]} is set, but drafting is {config.drafting!r}, which does not draft with the target's layers"
        )
    if len(made) > 1:
        raise ConfigError(f"{' and '.join(made)} are set; each says which layers draft, so only one can be")
    if runs_in_target and not made:
        raise ConfigError(f"drafting is {config.drafting!r}, which needs {' or '.join(choices)}, and neither is set")
    if config.self_draft_skip is not None:
        check_names(config.self_draft_skip)


def check_run_ahead(config: EngineConfig, run_ahead: str, *, has_draft_model: bool) -> None:
    """Refuse `run_ahead` "on" where a method cannot draft for verdicts that it does not know yet.

    Raises:
        ConfigError: the message names all three settings.
    """
    method = choose_method(config, has_draft_model=has_draft_model)
    if run_ahead == "on" and method.proposes and not method.can_run_ahead(config):
        raise ConfigError(
            f"run_ahead is on, but drafting is {config.drafting!r} and verification {config.verification!r}: "
            "then drafts are made only after the verdict is known"
        )


def check_family(target: ModelConfig, draft: ModelConfig | None, method: Method) -> bool:
    """Check that an encoder-decoder has a draft of its kind, if any, and a drafting method that fits it.

    Returns:
        Whether the target is an encoder-decoder.

    Raises:
        ModelMismatchError: one of the two models is an encoder-decoder, the other is not.
        ModelError: there is no such model, or the method does not fit.
    """
    has_encoder = is_encoder_decoder(target)
    if draft is not None and is_encoder_decoder(draft) != has_encoder:
        kinds = ("an encoder-decoder", "decoder-only")
        target_kind, draft_kind = kinds if has_encoder else kinds[::-1]
        raise ModelMismatchError(
            f"the target {target.path} is {target_kind}, the draft {draft.path} is {draft_kind}; "
            "both must be of the same kind"
        )
    if has_encoder and method.drafts_trees:
        raise ModelError(
            f"{target.path} is an encoder-decoder, which cannot verify trees: its attention depends on distances"
        )
    if has_encoder and method.runs_in == "target":
        raise ModelError(f"{target.path} is an encoder-decoder; it cannot draft for itself")
    return has_encoder


def settle_drafting(pair: PairConfig) -> tuple[ModelConfig | None, EngineConfig]:
    """Return the draft model to load, if any, and the engine's settings, with k = 0 if the method never drafts.

    Raises:
        ConfigError: as `choose_method`.
    """
    method = choose_method(pair.engine, has_draft_model=pair.draft is not None)
    if method.runs_in == "target" and pair.draft_model not in ("auto", "none"):
        raise ConfigError(f"draft_model is {pair.draft_model!r}, but drafting is {pair.drafting!r}, which uses none")
    engine = pair.engine if method.proposes else replace(pair.engine, num_speculative_tokens=0)
    return (pair.draft if method.loads_model else None), engine
