"""Loads a worker's backend, with the cores that its placement gives it, and the drafter or verifier over it."""

import logging

import torch

from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_store import FeatureStore
from engine.drafting.model.translated import translated
from engine.drafting.registry import choose_method
from engine.execution.backend import Backend
from engine.execution.registry import make_backend
from engine.heads.registry import load_head, load_target
from engine.models.causal_lm import Shard
from engine.models.first_layers import check_self_draft
from engine.models.loader import check_module
from engine.models.shards import plan_of
from engine.models.source import ModelSource, shared_tokens
from engine.protocols import Drafter
from engine.sampling.grammar import Grammars
from engine.verification.rule import rule_of
from engine.verification.verifier import ModelVerifier

logger = logging.getLogger(__name__)


def check_files(target: ModelSource, draft: ModelSource | None, world_size: int) -> None:
    """Raise ModelError if a pair and its head cannot be loaded, or do not fit; of weights, only headers are read."""
    for source in filter(None, (target, draft)):
        module = check_module(source)
        if source.head is not None:
            load_head(source.head, source, module, torch.device("meta"), torch.float32, 0)
        _ = source.eos_token_ids, source.tokenizer
    if draft is not None:
        shared_tokens(target, draft)
    if world_size > 1:
        plan_of(target, world_size)


def load_draft(
    source: ModelSource, target: ModelSource, engine: EngineConfig, *, run_ahead: bool, features: FeatureStore | None
) -> DraftModel:
    """Load the draft, to be warmed up, or raise ModelError; ids beyond the target's vocabulary are never drafted."""
    method = choose_method(engine, has_draft_model=True)
    branches = method.branches(engine, run_ahead=run_ahead)
    invariant = rule_of(engine.verification).needs_invariant_draft
    backend = make_backend(load_target(source), source, engine, invariant=invariant, branches=branches)
    backend = translated(backend, target, source)
    limit = target.vocab_size
    grammars = Grammars(target, vocab_size=limit, eos_token_ids=target.eos_token_ids)
    return DraftModel(backend, limit, grammars, run_ahead, features if method.reads_features else None)


def load_drafter(
    source: ModelSource, target: ModelSource, engine: EngineConfig, *, run_ahead: bool, features: FeatureStore
) -> tuple[Drafter, Backend]:
    """Load the draft and make its drafter, with a cache of its own; see `load_draft`."""
    draft = load_draft(source, target, engine, run_ahead=run_ahead, features=features)
    return choose_method(engine, has_draft_model=True).make(engine, draft), draft.backend


def load_verifier(source: ModelSource, engine: EngineConfig, *, shard: Shard | None) -> ModelVerifier:
    """Load the target or a rank's shard of it, to be warmed up, or raise ModelError."""
    check_self_draft(engine, source)
    source.check_length(engine.max_model_len)
    # Drafting in the target needs no draft model, so its absence makes no difference here.
    method = choose_method(engine, has_draft_model=True)
    model = load_target(source, shard, keeps_kv=not method.reads_features)
    backend = make_backend(model, source, engine, branches=method.branches(engine))
    info = backend.info
    grammars = Grammars(source, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
    verifier = ModelVerifier(backend, engine, grammars, method.make_in_target)
    logger.info("%d KV blocks of %d tokens", verifier.num_blocks, engine.block_size)
    if info.state_chunk:
        logger.info("%d state slots", engine.num_states)
    return verifier
