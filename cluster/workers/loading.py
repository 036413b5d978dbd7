"""What a worker loads: a backend, with the cores that its placement gives it, and the drafter or verifier over it."""

import logging

from engine.config import EngineConfig, ModelConfig, ModelInfo
from engine.drafting.registry import DraftModel, choose_method
from engine.execution.registry import load_backend
from engine.models.causal_lm import Shard
from engine.models.registry import eos_token_ids, read_config
from engine.models.sub_layers import check_self_draft
from engine.protocols import Drafter
from engine.sampling.grammar import Grammars
from engine.verification.verifier import ModelVerifier

logger = logging.getLogger(__name__)


def load_drafter(
    config: ModelConfig, target: ModelConfig, engine: EngineConfig, *, run_ahead: bool
) -> tuple[Drafter, ModelInfo]:
    """Load the draft; ids beyond the target's vocabulary are never drafted.

    Raises:
        ModelError: the model cannot be served.
    """
    backend = load_backend(config)
    target_config = read_config(target)
    limit = target_config.get_text_config().vocab_size
    grammars = Grammars(target, vocab_size=limit, eos_token_ids=eos_token_ids(target, target_config))
    method = choose_method(engine, has_draft_model=True)
    drafter = method.make(engine, DraftModel(backend, limit, grammars, run_ahead))
    backend.warm_up()
    return drafter, backend.info


def load_verifier(config: ModelConfig, engine: EngineConfig, *, shard: Shard | None) -> tuple[ModelVerifier, ModelInfo]:
    """Load the target, or a rank's shard of it.

    Raises:
        ModelError: the model cannot be served.
    """
    check_self_draft(engine, config)
    backend = load_backend(config, shard=shard)
    info = backend.info
    grammars = Grammars(config, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
    # What runs in the target needs no draft model, so it makes no difference here whether there is one.
    method = choose_method(engine, has_draft_model=True)
    verifier = ModelVerifier(backend, engine, grammars, method.make_in_target)
    logger.info("%d KV blocks of %d tokens", verifier.num_blocks, engine.block_size)
    backend.warm_up()
    return verifier, info
