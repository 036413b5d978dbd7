"""Settles a pair's settings once, where a process starts: which method drafts, and which models it loads.

Settled settings name the method, so nothing downstream decides again.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import SEEDED_RULES, EngineConfig, ModelConfig, PairConfig
from engine.drafting.registry import METHODS, Method, method_of
from engine.errors import ConfigError, ModelError, ModelMismatchError
from engine.execution.vllm.arguments import check_arguments
from engine.heads.config import drafts_blocks, kind_of, verifier_of
from engine.models.registry import open_model
from engine.models.source import ModelSource

logger = logging.getLogger(__name__)

_HEAD_METHODS = [name for name, method in METHODS.items() if method.drafts_with == "head"]


class Settled(NamedTuple):
    """The models to load, and the engine's settings."""

    target: ModelConfig  # with the head that drafts in its process
    draft: ModelConfig | None  # None if the method loads no draft model
    engine: EngineConfig  # `drafting` names the method; "none" where nothing may be drafted

    @property
    def method(self) -> Method:
        return method_of(self.engine.drafting)


def settle(pair: PairConfig) -> Settled:
    """Return the models to load and the engine's settings; raise ConfigError if two settings do not fit each other.

    A config.json tells whether the draft model is a head; if it is not on this machine, `drafting` has to say so. A
    method without drafts gets k = 0; if the settings ask for k = 0, speculation is off, and predictions are not copied.
    """
    draft, model = pair.draft, f"draft_model is {pair.draft_model!r}"
    settings, *others = [{}] if draft is None else map(_settings_of, open_model(draft).drafts)
    has_head = kind_of(settings) is not None
    if has_head and pair.drafting == "auto":
        pair = replace(pair, drafting="head")
    name = choose_method(pair.engine, has_draft_model=draft is not None)
    # Even if nothing is drafted, a head is checked and names the target.
    drafting, wanted, method = pair.drafting, method_of(pair.drafting), method_of(name)
    needs_head = wanted.drafts_with == "head"
    if others and (needs_head or has_head or any(map(kind_of, others))):
        raise ConfigError(f"{model}, several drafts, but a trained head drafts alone")
    if needs_head and (draft is None or (settings and not has_head)):
        raise ConfigError(f"drafting is {drafting!r}, but {model}, which is no trained head")
    if has_head and not needs_head and method.runs_in == "draft":
        raise ConfigError(f"{model}, which is a trained head, but drafting is {drafting!r}, which needs a whole model")
    if method.runs_in == "target" and not needs_head and pair.draft_model not in ("auto", "none"):
        raise ConfigError(f"{model}, but drafting is {drafting!r}, which uses none")
    if pair.vllm and pair.execution != "vllm":
        raise ConfigError(f"vllm is {pair.vllm}, but execution is {pair.execution!r}")
    check_arguments(pair.vllm, pair.target_quantization)
    if has_head or needs_head:
        if pair.draft_quantization != "none":
            raise ConfigError(f"draft_quantization is {pair.draft_quantization}, but the draft is a trained head")
        if pair.target_model == "auto":
            if (target_model := verifier_of(settings)) is None:
                problem = "do not name its target" if settings else "are not here (`paceline pull` downloads them)"
                raise ConfigError(f"{model}, a trained head whose files {problem}; set target_model")
            pair = replace(pair, target_model=target_model)
    target = pair.target
    if head := {"head": draft, "target_head": target}.get(method.drafts_with or ""):
        target = replace(target, head="@".join(filter(None, (head.path, head.revision))))
    engine = replace(
        pair.engine,
        drafting=name,
        num_speculative_tokens=pair.num_speculative_tokens if method.proposes else 0,
        speculation=pair.speculation if pair.num_speculative_tokens else "off",
        num_drafts=1 + len(others) if method.runs_in == "draft" else 1,
    )
    if method.reads_features:
        draft = replace(target, head_only=True, execution="torch", vllm={})
    return Settled(target, draft if method.runs_in == "draft" else None, engine)


def check_in_process(settled: Settled) -> None:
    """Raise ConfigError if the method needs a draft worker of its own, which a script has not."""
    if settled.method.reads_features:
        drafting = settled.engine.drafting
        raise ConfigError(f"drafting is {drafting!r}, but there is no draft worker in this process; use head")


def choose_method(config: EngineConfig, *, has_draft_model: bool) -> str:
    """Return the method that `config.drafting` asks for, "none" if nothing may be drafted.

    "auto" is "model" if there is a draft model, else "suffix". Raises ConfigError if settings do not fit each other.
    """
    drafting = config.drafting
    name = drafting if drafting != "auto" else "model" if has_draft_model else "suffix"
    method = method_of(name)
    drafts_with_layers = method.drafts_with == "target_layers"
    if drafts_with_layers and config.self_draft_layers is None:
        raise ConfigError(f"drafting is {name!r}, which needs self_draft_layers")
    if not drafts_with_layers and config.self_draft_layers is not None:
        problem = f"drafting is {drafting!r}, which does not draft with the target's layers"
        raise ConfigError(f"self_draft_layers is set, but {problem}")
    if not config.max_draft_tokens:
        return "none"
    if method.runs_in == "draft" and not has_draft_model:
        raise ConfigError(f"drafting is {name!r}, which needs a draft_model, and there is none")
    if ":" in config.verification:
        from engine.verification.rule import rule_of

        rule_of(config.verification)  # here, so that a wrong path is an error of the start
    elif method.proposes and config.verification not in method.rules:
        rules = " or ".join(method.rules)
        raise ConfigError(f"verification is {config.verification!r}, but drafting is {name!r}, which allows {rules}")
    return name


def check_run_ahead(engine: EngineConfig, run_ahead: str) -> None:
    """Raise ConfigError if `run_ahead` is "on" but the settled method cannot draft before the verdict is known."""
    method = method_of(engine.drafting)
    if run_ahead == "on" and method.proposes and engine.verification not in method.runs_ahead:
        methods = f"drafting is {engine.drafting!r} and verification {engine.verification!r}"
        raise ConfigError(f"run_ahead is on, but {methods}: then drafts are made only after the verdict is known")


def check_learning(engine: EngineConfig) -> None:
    """Raise ConfigError unless the settled method drafts with a model or a head in a draft worker, by a seeded rule."""
    method = method_of(engine.drafting)
    settings = f"draft_learning is on, but drafting is {engine.drafting!r} and verification {engine.verification!r}"
    if method.runs_in != "draft":
        raise ConfigError(f"{settings}: nothing drafts in a draft worker; a trained head does so by head_worker")
    if engine.num_drafts > 1:
        raise ConfigError(
            f"draft_learning is on, but draft_model names {engine.num_drafts} drafts; only a single one learns"
        )
    if engine.verification not in SEEDED_RULES:
        raise ConfigError(f"{settings}: it learns from the noise that drafts share with the text, as with coupled")


def check_kinds(target: ModelSource, draft: ModelSource | None, method: Method) -> None:
    """Check that target and draft are of one kind, and that such models can draft by this method.

    Raises ModelMismatchError for different kinds, and ModelError if the method does not fit. Warns if a head was
    trained for another target.
    """
    if (head := target.head) is not None:
        target.refuse("heads")
        if method.drafts_trees and drafts_blocks(head):
            raise ModelError(f"the head {head.path} drafts blocks; drafting must be head or head_worker")
        verifier = PairConfig(target_model=verifier_of(head.settings) or target.path).target.path
        if Path(verifier).name != Path(target.path).name:
            logger.warning("the head %s was trained for %s; the target is %s", head.path, verifier, target.path)
    for each in [] if head is not None or draft is None else draft.drafts:
        if kind_of(each.settings):
            raise ModelError(f"{each.path} is a trained head; drafting must be {', '.join(_HEAD_METHODS)}")
        if each.kind.name != target.kind.name:
            kinds = f"the target {target.path} is {target.kind.name}, the draft {each.path} is {each.kind.name}"
            raise ModelMismatchError(f"{kinds}; both must be of the same kind")
    if method.drafts_trees:
        target.refuse("trees")
        for each in [] if draft is None or method.runs_in != "draft" else draft.drafts:
            each.refuse_to_draft("trees")
    if method.runs_in == "target":
        target.refuse("self-drafts")
    if method.reads_features:
        target.refuse("features")


def _settings_of(model: ModelSource) -> Mapping[str, Any]:
    """Return a model's config.json; empty if it is not on this machine."""
    try:
        return model.settings
    except ModelError:
        return {}
