"""What a target gains when it drafts for itself without some of its sub-layers: acceptance measured, costs added up.

Acceptance is measured by the engine itself: a draft's passes read the target's keys and values of the committed tokens,
so a run of the thinned model by itself over the same text would accept less. Costs are those of a decode step, taken
as a sum over sub-layers and last layers: measuring them once keeps a machine's noise out of the choice between sets.
"""

import itertools
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.drafting.self_draft import SelfDrafter
from engine.engine import Engine
from engine.execution.backend import Backend
from engine.execution.batch import ForwardRow, build
from engine.llm import run_in_process
from engine.protocols import DeferringDrafter
from engine.sampling.params import SamplingParams
from engine.verification.verifier import ModelVerifier

CONTEXT_TOKENS = 128
_BLOCK_SIZE = 16
_REPEATS = 15
_STEPS = 4
"""Decode steps in a row, as of a draft: what a model reads can stay in a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The time of a decode step of the whole model, and what a step saves, in milliseconds.

    Attributes:
        attention_ms: saved without one attention sub-layer; `mlp_ms` without one MLP.
        layer_ms: saved without one of the last layers, which is more: its norms are not computed either.
    """

    num_layers: int
    whole_ms: float
    attention_ms: float
    mlp_ms: float
    layer_ms: float

    def ratio(self, skipped: Collection[str]) -> float:
        """Return t_draft / t_target of a draft without these sub-layers."""
        num_left = self.num_layers
        while {f"attention.{num_left - 1}", f"mlp.{num_left - 1}"} <= set(skipped):
            num_left -= 1
        num_attentions, num_mlps = (
            sum(f"{kind}.{layer}" in skipped for layer in range(num_left)) for kind in ("attention", "mlp")
        )
        saved_ms = num_attentions * self.attention_ms + num_mlps * self.mlp_ms
        saved_ms += (self.num_layers - num_left) * self.layer_ms
        return max(self.whole_ms - saved_ms, 0.01 * self.whole_ms) / self.whole_ms


@torch.inference_mode()
def measure_costs(target: Backend, num_layers: int) -> Costs:
    """Time the decode step of one request: whole, and without all MLPs, all attentions but one, or all layers but one.

    The four take turns, so that other load on the machine affects all of them alike.
    """
    kv = target.allocate_kv(CONTEXT_TOKENS // _BLOCK_SIZE + 2, _BLOCK_SIZE)
    mlps = [f"mlp.{layer}" for layer in range(num_layers)]
    attentions = [f"attention.{layer}" for layer in range(1, num_layers)]
    blocks = list(range(1, CONTEXT_TOKENS // _BLOCK_SIZE + 2))
    skipped = (mlps, attentions, attentions + mlps[1:])
    models = [(target, kv), *(target.thin(names, kv) for names in skipped)]
    steps = [(model, build([ForwardRow([1], CONTEXT_TOKENS, blocks, 1)], seen_kv)) for model, seen_kv in models]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_REPEATS):
        for (model, step), step_times in zip(steps, times, strict=True):
            started = time.perf_counter()
            for _ in range(_STEPS):
                model.run(step)
                model.wait()
            step_times.append(1000 * (time.perf_counter() - started) / _STEPS)
    whole, *thinned = (statistics.median(step_times) for step_times in times)
    no_mlps, one_attention, one_layer = (max(whole - thinned_ms, 0.0) for thinned_ms in thinned)
    num_others = num_layers - 1
    return Costs(num_layers, whole, one_attention / num_others, no_mlps / num_layers, one_layer / num_others)


@dataclass(frozen=True, slots=True)
class Gain:
    """What a set of skipped sub-layers promises.

    Attributes:
        acceptance: the share of drafts whose tokens 1 to i were all accepted, for each i.
        num_speculative_tokens: the number of draft tokens with the highest speed-up.
        speedup: over plain decoding, if drafts and verifications take turns and a pass over few tokens takes as long as
            one over one token (Leviathan et al., 2211.17192, Theorem 3.8, with the acceptance that was measured).
    """

    acceptance: list[float]
    cost_ratio: float
    num_speculative_tokens: int
    speedup: float


def gain(acceptance: Sequence[float], cost_ratio: float) -> Gain:
    """Return the gain at the best number of draft tokens; `acceptance` as in `Gain`."""
    lengths = itertools.accumulate(acceptance, initial=1.0)
    speedups = [length / (1 + k * cost_ratio) for k, length in enumerate(lengths)]
    best = max(range(1, len(speedups)), key=lambda k: speedups[k])
    return Gain(list(acceptance), cost_ratio, best, speedups[best])


def highest_speedup(max_draft_tokens: int, cost_ratio: float) -> float:
    """Return the speed-up if every draft token were accepted: no set of this cost can promise more."""
    return gain([1.0] * max_draft_tokens, cost_ratio).speedup


def measure_acceptance(
    target: Backend,
    skipped: Collection[str],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    num_draft_tokens: int,
) -> list[float]:
    """Continue all prompts with a target that drafts for itself; return the acceptance as in `Gain`.

    Args:
        params: texts may end up to `num_draft_tokens` after its `max_tokens`, so that no draft is cut short.
    """
    longest = params.max_tokens + num_draft_tokens
    config = EngineConfig(
        drafting="self",
        self_draft_skip=tuple(sorted(skipped)),
        speculation="fixed",
        num_speculative_tokens=num_draft_tokens,
        max_num_seqs=len(prompts),
        max_queued_requests=len(prompts),
        enable_prefix_caching=False,
        num_blocks=sum(-(-(len(prompt) + longest) // _BLOCK_SIZE) for prompt in prompts),
        block_size=_BLOCK_SIZE,
    )
    verifier = ModelVerifier(target, config, None, SelfDrafter)
    engine = Engine(
        config,
        drafter=DeferringDrafter(),
        verifier=verifier,
        num_blocks=verifier.num_blocks,
        vocab_size=target.info.vocab_size,
        max_model_len=target.info.max_model_len,
        eos_token_ids=target.info.eos_token_ids,
    )
    missing = {str(number): params.max_tokens for number in range(len(prompts))}
    for request_id, prompt in zip(missing, prompts, strict=True):
        engine.add(request_id, prompt, replace(params, max_tokens=longest))
    while engine.has_work:
        for output in run_in_process(engine.step()):
            missing[output.request_id] -= len(output.token_ids)
            if missing[output.request_id] <= 0:
                engine.abort(output.request_id)
    stats = engine.stats
    accepted = stats.num_accepted_tokens_per_pos + [0] * num_draft_tokens
    return [count / max(stats.num_drafts, 1) for count in accepted[:num_draft_tokens]]
