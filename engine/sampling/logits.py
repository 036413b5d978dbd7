"""Applies sampling parameters to logits and draws tokens, at every draft position.

All verification rules and drafters use these functions, in vLLM's order: logit_bias, min_tokens and grammar, penalties,
temperature, min_p, top_k, top_p. Penalties and grammar see the committed tokens and the draft tokens on a row's path.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.params import SamplingParams
from engine.protocols import Difference, Request
from engine.sampling import noise
from engine.sampling.grammar import Matcher
from engine.sampling.noise import Draws
from engine.sampling.row_shaping import penalise, scale
from engine.sampling.top_tokens import copied, keep_top


@dataclass(slots=True)
class Run:
    """Consecutive logit rows of one request."""

    request: Request
    depths: Sequence[int]  # per row, the draft tokens between the committed tip and the row; 0 is the tip
    paths: Sequence[Sequence[int]] = ()  # per row, these draft tokens; only if `params.depends_on_path`
    end_ids: Sequence[int] = ()  # end-of-text and stop ids, forbidden before min_tokens
    matcher: Matcher | None = None
    seeds: Sequence[int] = ()  # per row, the seed outside the target's stream; empty: this round's
    differences: list[Difference] = field(default_factory=list)  # what `coupled` finds, if the request audits

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def positions(self) -> list[int]:
        """The absolute position of the token drawn from each row."""
        return [len(self.request.token_ids) + depth for depth in self.depths]


def shape(logits: Tensor, runs: Sequence[Run]) -> Tensor:
    """Apply every run's sampling parameters to its rows of logits [n, vocab], float32, in place where possible.

    Returns [n, vocab] unnormalised log probabilities, -inf for forbidden tokens; greedy rows keep temperature 1.
    """
    start = 0
    for run in runs:
        rows = logits[start : start + len(run.depths)]
        start += len(run.depths)
        params = run.params
        if params.logit_bias:
            ids = copied(list(params.logit_bias), logits.device)
            rows[:, ids] += copied(list(params.logit_bias.values()), logits.device)
        if params.min_tokens and run.end_ids:
            ends = copied(list(run.end_ids), logits.device)
            for row, depth in zip(rows, run.depths, strict=True):
                if run.request.num_output_tokens + depth < params.min_tokens:
                    row[ends] = float("-inf")
        if run.matcher is not None:
            forbid(rows, run.matcher.masks(run.request.output, run.paths))
    if any(run.params.has_penalties for run in runs):
        _penalise(logits, runs)
    temperature = min_p = None
    if any(0 < run.params.temperature != 1 for run in runs):
        temperature = _column(runs, logits, lambda params: params.temperature or 1.0)
    if any(run.params.min_p > 0 for run in runs):
        min_p = _column(runs, logits, lambda params: params.min_p)
    scale(logits, temperature, min_p)
    if any(run.params.top_k > 0 or run.params.top_p < 1 for run in runs):
        keep_top(logits, [run.params for run in runs for _ in run.depths])
    return logits


def needs_shaping(params: SamplingParams) -> bool:
    """Return whether `shape` does more than divide by the temperature; otherwise a pass can draw the row itself."""
    is_cut = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
    return bool(is_cut or params.depends_on_path or params.logit_bias or params.min_tokens)


def forbid(logits: Tensor, masks: Sequence[bytes]) -> None:
    """Set logits [rows, vocab] of forbidden tokens to -inf, in place, by `Matcher.masks` of the rows."""
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1, 1)
    packed = packed.to(logits.device, non_blocking=True)
    bits = packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    allowed = bits.view(len(masks), -1)[:, : logits.shape[-1]] != 0
    # A draft with a smaller vocabulary may lack all allowed tokens; then its row stays as it is.
    is_possible = (allowed & (logits > float("-inf"))).any(-1, keepdim=True)
    logits.masked_fill_(~allowed & is_possible, float("-inf"))


def plan_draws(
    params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device, steps: int = 1
) -> list[Draws]:
    """Return temperatures and noise keys for `steps` passes that each draw one further token per row.

    positions: per row, where the first step draws. Rows that need shaping get greedy draws, to be replaced later.
    """
    # Rows with the same seed and position share one key, because noise costs more than a lookup.
    key_rows: dict[tuple[int, int], int] = {}
    rows, temperatures = [0] * len(params), [1.0] * len(params)
    distinct = {id(sampling): sampling for sampling in params}  # a request's rows share their parameters
    drawn = {key for key, sampling in distinct.items() if sampling.temperature > 0 and not needs_shaping(sampling)}
    for i, (sampling, position) in enumerate(zip(params, positions, strict=True)):
        if id(sampling) in drawn:
            rows[i] = key_rows.setdefault((sampling.seed or 0, position), len(key_rows) + 1)
            temperatures[i] = sampling.temperature
    seeds = [seed for seed, _ in key_rows]
    later = [position + step for step in range(steps) for _, position in key_rows]
    keys = noise.keys(seeds * steps, later, noise.TARGET_STREAM, device).view(steps, len(key_rows), 2)
    column = torch.tensor(temperatures, device=device).unsqueeze(-1)
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    return [Draws(column, step_keys, index) for step_keys in keys]


def draw(shaped: Tensor, runs: Sequence[Run], stream: int = noise.TARGET_STREAM) -> Tensor:
    """Draw one token per row of shaped [n, vocab], by argmax or Gumbel-max with the request's noise; [n] int64."""
    return noised(shaped, runs, stream).argmax(-1)


def noised(shaped: Tensor, runs: Sequence[Run], stream: int = noise.TARGET_STREAM) -> Tensor:
    """Return logits plus noise, [n, vocab], whose argmax `draw` returns."""
    if all(run.params.temperature == 0 for run in runs):
        return shaped
    return shaped + gumbel_rows(runs, shaped, stream)


def gumbel_rows(runs: Sequence[Run], like: Tensor, stream: int) -> Tensor:
    """Return every row's noise, [n, vocab]; 0 for greedy requests."""
    positions = [position for run in runs for position in run.positions]
    seeds: list[int] = []
    for run in runs:
        seed, count = run.params.seed or 0, len(run.depths)
        if stream == noise.TARGET_STREAM:
            seeds += [seed] * count
        else:
            seeds += run.seeds or [noise.round_seed(seed, len(run.request.token_ids))] * count
    keys = noise.keys(seeds, positions, stream, like.device)
    rows = noise.gumbel(keys, torch.arange(like.shape[-1], dtype=torch.int32, device=like.device))
    if any(run.params.temperature == 0 for run in runs):
        rows.masked_fill_(_column(runs, like, lambda params: params.temperature) == 0, 0.0)
    return rows


def probabilities(shaped: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return every row's distribution, [n, vocab]; one-hot for greedy requests."""
    probs = shaped.softmax(-1)
    if any(run.params.temperature == 0 for run in runs):
        certain = torch.zeros_like(probs).scatter_(-1, shaped.argmax(-1, keepdim=True), 1.0)
        greedy = _column(runs, shaped, lambda params: params.temperature) == 0
        probs = torch.where(greedy, certain, probs)
    return probs


def _column(runs: Sequence[Run], like: Tensor, value: Callable[[SamplingParams], float]) -> Tensor:
    numbers = [value(run.params) for run in runs for _ in run.depths]
    return copied(numbers, like.device, like.dtype).unsqueeze(-1)


def _penalise(logits: Tensor, runs: Sequence[Run]) -> None:
    """Apply penalties as vLLM does; as in transformers, an encoder's source does not count."""
    ends = list(itertools.accumulate(len(run.depths) for run in runs))
    penalised = [
        (run, list(range(end - len(run.depths), end)))
        for run, end in zip(runs, ends, strict=True)
        if run.params.has_penalties
    ]
    chosen = [run for run, _ in penalised]
    device, vocab = logits.device, logits.shape[-1]
    rows = copied([row for _, run_rows in penalised for row in run_rows], device)
    run_of_row = copied([i for i, (_, run_rows) in enumerate(penalised) for _ in run_rows], device)
    prompts = [run.request.token_ids[run.request.input_length : run.request.prompt_length] for run in chosen]
    in_prompt = _count(prompts, vocab, device) > 0
    counts = _count([run.request.output for run in chosen], vocab, device)[run_of_row]
    if any(run.paths for run in chosen):
        counts += _count([path for run in chosen for path in run.paths or [()] * len(run.depths)], vocab, device)
    seen = in_prompt[run_of_row] | (counts > 0)
    repetition = _column(chosen, logits, lambda params: params.repetition_penalty)
    frequency = _column(chosen, logits, lambda params: params.frequency_penalty)
    presence = _column(chosen, logits, lambda params: params.presence_penalty)
    logits[rows] = penalise(logits[rows], seen, counts, repetition, frequency, presence)


def _count(sequences: Sequence[Sequence[int]], vocab: int, device: torch.device) -> Tensor:
    """Return how often each token occurs in each sequence, [sequences, vocab] int32."""
    tokens = copied([token for sequence in sequences for token in sequence], device, torch.int64)
    lengths = copied([len(sequence) for sequence in sequences], device)
    index = torch.arange(len(sequences), device=device).repeat_interleave(lengths, output_size=len(tokens))
    counts = torch.zeros(len(sequences), vocab, dtype=torch.int32, device=device)
    return counts.index_put_((index, tokens), torch.ones_like(index, dtype=torch.int32), accumulate=True)
