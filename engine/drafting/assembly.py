"""Assembly: a target and its draft, checked together and then loaded; a script loads both, a worker either."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_store import FeatureStore
from engine.drafting.model.translated import translated
from engine.drafting.registry import Method, method_of
from engine.errors import ConfigError, ModelError
from engine.execution.reduce import World
from engine.execution.registry import make_backend
from engine.execution.vllm.arguments import check_version, set_environment
from engine.heads.registry import check_target, load_target
from engine.models.first_layers import check_self_draft
from engine.models.shards import plan_of
from engine.models.shared_tokens import shared_tokens
from engine.models.source import ModelSource
from engine.sampling.grammar import Grammars
from engine.verification.rule import rule_of
from engine.verification.verifier import ModelVerifier

if TYPE_CHECKING:
    from engine.execution.vllm.vllm_verifier import VllmVerifier

logger = logging.getLogger(__name__)

LoadedVerifier: TypeAlias = "ModelVerifier | VllmVerifier"
"""A target in this process: computed by our own passes, or by vLLM."""


@dataclass(frozen=True)
class Assembly:
    """Models that go together, with settled settings; `assemble` makes it.

    `draft` brings the drafts beside it; `shared_ids` has for each of them what `shared_tokens` returns.
    """

    target: ModelSource
    draft: ModelSource | None
    engine: EngineConfig
    shared_ids: Sequence[dict[int, int] | None] = ()

    @property
    def method(self) -> Method:
        return method_of(self.engine.drafting)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.target, vocab_size=self.target.vocab_size, eos_token_ids=self.target.eos_token_ids)

    def load_verifier(self, world: World | None = None) -> LoadedVerifier:
        """Load the target or a rank's shard of it, or raise ModelError; it still has to warm up."""
        method, engine = self.method, self.engine
        if self.target.config.execution == "vllm":
            return load_vllm(self.target, engine, self.grammars, world)
        shard = None if world is None else world.shard()
        model = load_target(self.target, shard, keeps_kv=not method.reads_features)
        backend = make_backend(model, self.target, engine, branches=method.branches(engine))
        verifier = ModelVerifier(backend, engine, self.grammars, method.make_in_target)
        logger.info("%d KV blocks of %d tokens", verifier.num_blocks, engine.block_size)
        if backend.info.state_chunk:
            logger.info("%d state slots", engine.num_states)
        return verifier

    def load_drafts(self, *, run_ahead: bool = False, features: FeatureStore | None = None) -> list[DraftModel]:
        """Load the drafts, or raise ModelError; they never draft ids beyond the target's vocabulary.

        run_ahead: they will draft before the verdict is known; features: the target's as they arrive.
        """
        method, engine = self.method, self.engine
        branches = method.branches(engine, run_ahead=run_ahead)
        invariant = rule_of(engine.verification).needs_draft_rows
        features = features if method.reads_features else None
        drafts = []
        for source, shared in zip(self.draft.drafts if self.draft else (), self.shared_ids, strict=True):
            backend = make_backend(load_target(source), source, engine, invariant=invariant, branches=branches)
            backend = translated(backend, self.target, source, shared)
            drafts.append(DraftModel(backend, self.target.vocab_size, self.grammars, run_ahead, features))
        return drafts


def assemble(target: ModelSource, draft: ModelSource | None, engine: EngineConfig) -> Assembly:
    """Return a pair to be loaded, given settled settings; `draft` is None where this process loads none.

    Raises ModelError for a missing model or an unfit setting, and what `shared_tokens` raises.
    """
    check_self_draft(engine, target)
    target.check_length(engine.max_model_len)
    return Assembly(target, draft, engine, [shared_tokens(target, each) for each in draft.drafts] if draft else [])


def load_vllm(source: ModelSource, engine: EngineConfig, grammars: Grammars, world: World | None) -> "VllmVerifier":
    """Load a target into vLLM; raise ModelError if it is another release than tested, or does not serve the target."""
    set_environment(source.config)
    try:
        check_version()
        from engine.execution.vllm.vllm_verifier import VllmVerifier

        return VllmVerifier(source, engine, grammars, world)
    except ConfigError as error:
        raise ModelError(str(error)) from error


def check_files(target: ModelSource, draft: ModelSource | None, world_size: int) -> None:
    """Raise ModelError if a pair cannot be loaded or does not fit; reads only the headers of weights."""
    drafts = draft.drafts if draft else []
    for source in (target, *drafts):
        if source.config.execution == "torch":
            check_target(source)
        _ = source.eos_token_ids, source.tokenizer, source.weight_files
    for each in drafts:
        shared_tokens(target, each)
    if world_size > 1 and target.config.execution == "torch":
        plan_of(target, world_size)
