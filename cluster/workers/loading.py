"""What a worker loads: a model, with the threads that suit it, and the drafter or verifier over it."""

import logging
import time
from dataclasses import replace

import ray

from cluster.placement import count_cores
from engine.config import EngineConfig, ModelConfig, ModelInfo
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.execution.cpu.threads import fit_threads
from engine.models.causal_lm import CausalLM, Shard
from engine.models.registry import eos_token_ids, read_config
from engine.sampling.grammar import Grammars
from engine.verification.verifier import ModelVerifier

logger = logging.getLogger(__name__)

_WORTH = 0.8
"""Of the time that fewer threads take, more must take less than this: other processes want the cores too, and a number
that came out ahead by chance stays. On two virtual cores a second thread took 0.9 at best, and where it had to be
woken for each layer, as here, passes took twice as long as with one."""


def load_drafter(
    config: ModelConfig, target: ModelConfig, engine: EngineConfig, *, run_ahead: bool
) -> tuple[ModelDrafter, ModelInfo]:
    """Load the draft; ids beyond the target's vocabulary are never drafted.

    Raises:
        ModelError: the model cannot be served.
    """
    model = _load(config)
    target_config = read_config(target)
    limit = target_config.get_text_config().vocab_size
    grammars = Grammars(target, vocab_size=limit, eos_token_ids=eos_token_ids(target, target_config))
    drafter_class = RunAheadDrafter if run_ahead else ModelDrafter
    drafter = drafter_class(model, engine, token_limit=limit, grammars=grammars)
    model.use_huge_pages_soon()
    return drafter, model.info


def load_verifier(config: ModelConfig, engine: EngineConfig, *, shard: Shard | None) -> tuple[ModelVerifier, ModelInfo]:
    """Load the target, or a rank's shard of it.

    Raises:
        ModelError: the model cannot be served.
    """
    model = _load(config, shard=shard)
    info = model.info
    if shard is not None and model.device.type == "cpu":
        # Ranks on CPU take their KV blocks from one memory.
        engine = replace(engine, memory_fraction=engine.memory_fraction / shard.world_size)
    grammars = Grammars(config, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
    verifier = ModelVerifier(model, engine, grammars)
    logger.info("%d KV blocks of %d tokens", verifier.num_blocks, engine.block_size)
    model.use_huge_pages_soon()
    return verifier, info


def _load(config: ModelConfig, *, shard: Shard | None = None) -> CausalLM:
    """Load a model and settle its number of threads, within the cores that its share of the ranks leaves it.

    Ray would leave a worker one thread, by OMP_NUM_THREADS, whatever the machine has.
    """
    cores = count_cores(ray.get_runtime_context().get_node_id()) // (shard.world_size if shard else 1)
    model = CausalLM.load(replace(config, num_threads=config.num_threads or max(1, cores)), shard=shard)

    def choose() -> None:
        started = time.monotonic()
        threads = model.threads = fit_threads(model, cores, worth=_WORTH)
        logger.info("%s runs with threads: %s, chosen in %.1f s", config.path, threads, time.monotonic() - started)

    # Several ranks run their passes together, so they cannot try different numbers of threads.
    if model.device.type == "cpu" and config.num_threads is None and cores > 1 and shard is None:
        choose()
        model.when_compiled = choose  # those of eager passes may be too many
    return model
