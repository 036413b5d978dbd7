"""Engines over any model, and loops that run them to the end."""

import itertools
import time
from dataclasses import replace

from engine.config import VLLM_BLOCK_SIZE, EngineConfig
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import METHODS
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.engine import Engine
from engine.protocols import DeferringDrafter, NoDrafter, Request, run_in_process
from engine.sampling.logits import Run, draw, shape
from engine.verification.verifier import ModelVerifier
from tests.fakes import ForgetfulDrafter, InterruptedDrafter, TreeDrafter


def chains(model, grammars=None):
    """A function of a configuration that makes the drafter of a draft model."""
    return lambda config: ModelDrafter(DraftModel(model, grammars=grammars), config)


def drafters(target, draft, grammars=None, *, tokens=range(2, 20)):
    """Drafters of several kinds, as functions of a configuration."""
    right, random = DraftModel(target, grammars=grammars), DraftModel(draft, grammars=grammars)
    return {
        "the target itself": lambda config: ModelDrafter(right, config),
        "a random draft": lambda config: ModelDrafter(random, config),
        "forgetful": lambda config: ForgetfulDrafter(ModelDrafter(right, config)),
        "running ahead": lambda config: InterruptedDrafter(RunAheadDrafter(right, config)),
        "trees by the target itself": lambda config: METHODS["tree"].make(config, right),
        "trees": lambda _: TreeDrafter(tokens),
        "suffixes": lambda _: SuffixDrafter(),
    }


_ROOM = {"max_num_seqs": 1500, "max_num_batched_tokens": 10**6, "num_blocks": 12_000, "block_size": 4}
SAMPLING = _ROOM | {"num_speculative_tokens": 3}
"""Settings with which all samples of a law are drawn in one batch."""


def make_engine(
    model,
    drafter=None,
    *,
    tokenizer=None,
    grammars=None,
    clock=time.perf_counter,
    state_chunk=0,
    make_verifier=ModelVerifier,
    **settings,
):
    """An engine whose draft length is fixed unless said otherwise.

    Args:
        make_verifier: makes a `ModelVerifier`, or one over vLLM, whose blocks are longer.
        state_chunk: as if the model had linear layers of this chunk length.
        drafter: a function of its configuration; None is none, or that of a method that runs in the target.
    """
    defaults = {"num_blocks": 3000, "max_num_seqs": 64, "max_queued_requests": 10**6, "speculation": "fixed"}
    defaults["num_states"] = 100
    config = EngineConfig(**(defaults | settings))
    if make_verifier is not ModelVerifier:
        num_blocks = -(-config.num_blocks * config.block_size // VLLM_BLOCK_SIZE)
        config = replace(config, block_size=VLLM_BLOCK_SIZE, num_blocks=min(num_blocks, 500))
    method = METHODS.get(config.drafting, METHODS["none"])
    verifier = make_verifier(model, config, grammars, method.make_in_target)
    if drafter is None:
        drafter = DeferringDrafter() if method.runs_in == "target" else NoDrafter()
    else:
        drafter = drafter(config)
    return Engine(
        config,
        replace(model.info, state_chunk=state_chunk) if state_chunk else model.info,
        drafter=drafter,
        verifier=verifier,
        num_blocks=verifier.num_blocks,
        tokenizer=tokenizer,
        clock=clock,
    )


def step(engine):
    return run_in_process(engine.step())


def run_outputs(engine, requests, *, between=None):
    """Generate everything and return every round's outputs per request.

    Args:
        between: called with the engine and the round after each one.
    """
    for i, (prompt, params) in enumerate(requests):
        engine.add(str(i), prompt, params)
    outputs = {str(i): [] for i in range(len(requests))}
    for rounds in itertools.count():
        if not engine.has_work:
            break
        for output in step(engine):
            outputs.setdefault(output.request_id, []).append(output)
        if between is not None:
            between(engine, rounds)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return outputs


def run(engine, requests, **options):
    """Generate everything; returns the tokens per request."""
    outputs = run_outputs(engine, requests, **options)
    return {name: [token for output in rounds for token in output.token_ids] for name, rounds in outputs.items()}


def expected_tokens(model, prompt, params):
    """The text of a request by itself: one token after the other, no cache, no batch. `model` knows its `law`."""
    tokens = list(prompt)
    params = replace(params, seed=params.seed or 0)
    ends = set() if params.ignore_eos else set(model.info.eos_token_ids)
    while len(tokens) - len(prompt) < params.max_tokens:
        end_ids = (*model.info.eos_token_ids, *params.stop_token_ids)
        one = [Run(Request("", tokens, len(prompt), params), [0], [[]], end_ids)]
        token = int(draw(shape(model.law(tokens).log().unsqueeze(0), one), one))
        tokens.append(token)
        if token in ends | set(params.stop_token_ids) and len(tokens) - len(prompt) >= params.min_tokens:
            break
    return tokens[len(prompt) :]
