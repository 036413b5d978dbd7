"""Engines over any model, and loops that run them to the end."""

import itertools
import time
from dataclasses import replace

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.engine import Engine
from engine.llm import run_in_process
from engine.protocols import DeferringDrafter, NoDrafter, Request
from engine.sampling.logits import Run, draw, shape
from engine.verification.verifier import ModelVerifier


def make_engine(model, drafter=None, *, tokenizer=None, grammars=None, clock=time.perf_counter, **settings):
    """An engine whose draft length is fixed unless said otherwise.

    Args:
        drafter: a function of its configuration; None is none, or that of a method that runs in the target.
    """
    defaults = {"num_blocks": 3000, "max_num_seqs": 64, "max_queued_requests": 10**6, "speculation": "fixed"}
    config = EngineConfig(**(defaults | settings))
    method = METHODS.get(config.drafting, METHODS["none"])
    verifier = ModelVerifier(model, config, grammars, method.make_in_target)
    if drafter is None:
        drafter = DeferringDrafter() if method.runs_in == "target" else NoDrafter()
    else:
        drafter = drafter(config)
    return Engine(
        config,
        drafter=drafter,
        verifier=verifier,
        num_blocks=verifier.num_blocks,
        vocab_size=model.info.vocab_size,
        max_model_len=model.info.max_model_len,
        eos_token_ids=model.info.eos_token_ids,
        decoder_start_id=model.info.decoder_start_id,
        tokenizer=tokenizer,
        clock=clock,
    )


def step(engine):
    return run_in_process(engine.step())


def run_outputs(engine, requests, *, between=None, late=()):
    """Generate everything and return every round's outputs per request.

    Args:
        between: called with the engine and the round after each one.
        late: requests that arrive one a round.
    """
    for i, (prompt, params) in enumerate(requests):
        engine.add(str(i), prompt, params)
    waiting = list(enumerate(late, start=len(requests)))
    outputs = {str(i): [] for i in range(len(requests) + len(waiting))}
    for rounds in itertools.count():
        if waiting:
            i, (prompt, params) = waiting.pop(0)
            engine.add(str(i), prompt, params)
        if not engine.has_work:
            break
        for output in step(engine):
            outputs.setdefault(output.request_id, []).append(output)
        if between is not None:
            between(engine, rounds)
    assert engine.num_free_blocks == engine.num_blocks
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
