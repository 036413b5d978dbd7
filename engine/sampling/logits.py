"""Applies sampling parameters to logits and draws tokens, at every draft position; nothing else does.

All verification rules and drafters use these functions, so draft and target logits are shaped alike. The order is
vLLM's: logit_bias, min_tokens and grammar, penalties, temperature, min_p, top_k, top_p. Penalties and grammar of a row
take into account the committed tokens and the draft tokens on the row's path.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.protocols import Request
from engine.sampling import noise
from engine.sampling.grammar import Matcher
from engine.sampling.noise import Draws
from engine.sampling.params import SamplingParams

_NUM_CANDIDATES = 256
"""Number of most likely tokens that top_k and top_p search first."""


@dataclass(slots=True)
class Run:
    """Consecutive logit rows of one request.

    Attributes:
        depths: per row, the number of draft tokens between the committed tip and the row; 0 is the tip itself.
        paths: per row, those draft tokens. Needed if `params.depends_on_path`, else empty.
        end_ids: ids that may not be drawn before min_tokens: end-of-text and stop ids.
        matcher: the state of the request's grammar, if it has one.
        tips: per row, how many tokens will be committed before the round that the row is drawn in; empty for the
            request's own. Only drafts that run ahead of their round differ.
        lanes: per row, which of several independent draft tokens at its position is drawn; empty for the first.
    """

    request: Request
    depths: Sequence[int]
    paths: Sequence[Sequence[int]] = ()
    end_ids: Sequence[int] = field(default_factory=tuple)
    matcher: Matcher | None = None
    tips: Sequence[int] = ()
    lanes: Sequence[int] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def positions(self) -> list[int]:
        """The absolute position of the token drawn from each row."""
        return [len(self.request.token_ids) + depth for depth in self.depths]


def shape(logits: Tensor, runs: Sequence[Run]) -> Tensor:
    """Apply every run's sampling parameters to its rows, in place where possible.

    Args:
        logits: [n, vocab] float32, the rows of all runs in order.

    Returns:
        [n, vocab] unnormalised log probabilities; -inf where a token may not be drawn. A greedy row keeps temperature
        1: its token is the argmax.
    """
    start = 0
    for run in runs:
        rows = logits[start : start + len(run.depths)]
        start += len(run.depths)
        params = run.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            rows[:, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.min_tokens:
            _forbid_end_ids(rows, run)
        if run.matcher is not None:
            forbid(rows, run.matcher.masks(run.request.output, run.paths))
    if any(run.params.has_penalties for run in runs):
        _penalise(logits, runs)
    if any(0 < run.params.temperature != 1 for run in runs):
        logits.div_(_column(runs, logits, lambda params: params.temperature or 1.0))
    if any(run.params.min_p > 0 for run in runs):
        floor = logits.amax(-1, keepdim=True) + _column(runs, logits, lambda params: params.min_p).log()
        logits.masked_fill_(logits < floor, float("-inf"))
    if any(run.params.top_k > 0 or run.params.top_p < 1 for run in runs):
        _keep_top(logits, runs)
    return logits


def needs_shaping(params: SamplingParams) -> bool:
    """Return whether `shape` does more than divide by the temperature; a pass can draw all other rows itself."""
    is_cut = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
    return bool(is_cut or params.depends_on_path or params.logit_bias or params.min_tokens)


def any_needs_shaping(params: Sequence[SamplingParams]) -> bool:
    """Return whether any row needs shaping; rows of one request have the same parameters."""
    return any(map(needs_shaping, _distinct(params)))


def forbid(logits: Tensor, masks: Sequence[bytes]) -> None:
    """Set the logits of tokens that a grammar forbids to -inf, in place.

    Args:
        logits: [rows, vocab].
        masks: [rows], from `Matcher.masks`.
    """
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    bits = (
        packed.view(len(masks), -1, 1).to(logits.device) >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    )
    allowed = bits.view(len(masks), -1)[:, : logits.shape[-1]] != 0
    # A draft with a smaller vocabulary may have none of the allowed tokens; then its row stays as it is.
    is_possible = (allowed & (logits > float("-inf"))).any(-1, keepdim=True)
    logits.masked_fill_(~allowed & is_possible, float("-inf"))


def plan_draws(
    params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device, steps: int = 1
) -> list[Draws]:
    """Return the temperatures and noise keys with which `steps` passes draw a token per row, one position further each.

    Args:
        params: per row; rows that need shaping get greedy draws, to be replaced by draws from shaped logits.
        positions: per row, the position of the token that the first step draws.
    """
    # Rows with the same seed and position share one key, because noise costs more than a lookup.
    key_rows: dict[tuple[int, int], int] = {}
    rows, temperatures = [0] * len(params), [1.0] * len(params)
    drawn = {id(sampling) for sampling in _distinct(params) if sampling.temperature > 0 and not needs_shaping(sampling)}
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


def _distinct(params: Sequence[SamplingParams]) -> Collection[SamplingParams]:
    """Return each object once: the rows of one request share theirs."""
    return {id(sampling): sampling for sampling in params}.values()


def draw(shaped: Tensor, runs: Sequence[Run], stream: int = noise.TARGET_STREAM) -> Tensor:
    """Draw one token per row: the argmax for greedy requests, else Gumbel-max with the request's noise.

    Args:
        shaped: [n, vocab], from `shape`.

    Returns:
        [n] int64.
    """
    return noised(shaped, runs, stream).argmax(-1)


def noised(shaped: Tensor, runs: Sequence[Run], stream: int = noise.TARGET_STREAM) -> Tensor:
    """Return the scores whose argmax `draw` returns, [n, vocab]: logits plus noise."""
    if all(run.params.temperature == 0 for run in runs):
        return shaped
    return shaped + gumbel_rows(runs, shaped, stream)


def gumbel_rows(runs: Sequence[Run], like: Tensor, stream: int) -> Tensor:
    """Return every row's noise, [n, vocab]; 0 for greedy requests."""
    positions = [position for run in runs for position in run.positions]
    seeds = [seed for run in runs for seed in _seeds(run, stream)]
    keys = noise.keys(seeds, positions, stream, like.device)
    rows = noise.gumbel(keys, torch.arange(like.shape[-1], dtype=torch.int32, device=like.device))
    if any(run.params.temperature == 0 for run in runs):
        rows.masked_fill_(_column(runs, like, lambda params: params.temperature) == 0, 0.0)
    return rows


def _seeds(run: Run, stream: int) -> list[int]:
    """Return the seed of each row's draw: only the target's own is not drawn anew in every round."""
    seed = run.params.seed or 0
    if stream == noise.TARGET_STREAM:
        return [seed] * len(run.depths)
    tips = run.tips or [len(run.request.token_ids)] * len(run.depths)
    lanes = run.lanes or [0] * len(run.depths)
    return [noise.round_seed(seed, tip, lane) for tip, lane in zip(tips, lanes, strict=True)]


def probabilities(shaped: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return every row's distribution, [n, vocab]; one-hot for greedy requests."""
    probs = shaped.softmax(-1)
    if any(run.params.temperature == 0 for run in runs):
        certain = torch.zeros_like(probs).scatter_(-1, shaped.argmax(-1, keepdim=True), 1.0)
        greedy = _column(runs, shaped, lambda params: params.temperature) == 0
        probs = torch.where(greedy, certain, probs)
    return probs


def _copied(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers to a device without waiting for its queued work."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def _reads_cheaply(device: torch.device) -> bool:
    """Return whether reading a result on the host is cheap; on a GPU it waits for all queued work."""
    return device.type == "cpu"


def _column(runs: Sequence[Run], like: Tensor, value: Callable[[SamplingParams], float]) -> Tensor:
    """Return one number per row, [n, 1]."""
    numbers = [value(run.params) for run in runs for _ in run.depths]
    return _copied(numbers, like.device, like.dtype).unsqueeze(-1)


def _forbid_end_ids(rows: Tensor, run: Run) -> None:
    committed = len(run.request.token_ids) - run.request.prompt_length
    early = [i for i, depth in enumerate(run.depths) if committed + depth < run.params.min_tokens]
    if early and run.end_ids:
        ends = torch.tensor(list(run.end_ids), device=rows.device)
        rows[torch.tensor(early, device=rows.device).unsqueeze(-1), ends] = float("-inf")


def _penalise(logits: Tensor, runs: Sequence[Run]) -> None:
    """Apply penalties as vLLM does: repetition counts prompt and output, presence and frequency only the output.

    An encoder's input does not count, as in transformers.
    """
    ends = list(itertools.accumulate(len(run.depths) for run in runs))
    penalised = [
        (run, list(range(end - len(run.depths), end)))
        for run, end in zip(runs, ends, strict=True)
        if run.params.has_penalties
    ]
    chosen = [run for run, _ in penalised]
    device, vocab = logits.device, logits.shape[-1]
    rows = torch.tensor([row for _, run_rows in penalised for row in run_rows], device=device)
    run_of_row = torch.tensor([i for i, (_, run_rows) in enumerate(penalised) for _ in run_rows], device=device)
    prompts = [run.request.token_ids[run.request.encoder_length : run.request.prompt_length] for run in chosen]
    in_prompt = _count(prompts, vocab, device) > 0
    counts = _count([run.request.output for run in chosen], vocab, device)[run_of_row]
    if any(run.paths for run in chosen):
        counts += _count([path for run in chosen for path in run.paths or [()] * len(run.depths)], vocab, device)
    seen = in_prompt[run_of_row] | (counts > 0)
    shaped = logits[rows]
    repetition = _column(chosen, logits, lambda params: params.repetition_penalty)
    shaped = torch.where(seen, torch.where(shaped > 0, shaped / repetition, shaped * repetition), shaped)
    shaped -= _column(chosen, logits, lambda params: params.frequency_penalty) * counts
    shaped -= _column(chosen, logits, lambda params: params.presence_penalty) * (counts > 0)
    logits[rows] = shaped


def _count(sequences: Sequence[Sequence[int]], vocab: int, device: torch.device) -> Tensor:
    """Return how often each token occurs in each sequence, [sequences, vocab] int32."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64, device=device)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    index = torch.arange(len(sequences), device=device).repeat_interleave(lengths, output_size=len(tokens))
    counts = torch.zeros(len(sequences), vocab, dtype=torch.int32, device=device)
    return counts.index_put_((index, tokens), torch.ones_like(index, dtype=torch.int32), accumulate=True)


def _keep_top(logits: Tensor, runs: Sequence[Run]) -> None:
    """Keep each row's top_k tokens, then the fewest of them whose probabilities sum to top_p; ties go to lower ids.

    Greedy rows stay as they are, because the most likely token is always kept.
    """
    vocab = logits.shape[-1]
    params = [run.params for run in runs for _ in run.depths]
    limits = [sampling.top_k if 0 < sampling.top_k < vocab else vocab for sampling in params]
    cut = [
        i for i, sampling in enumerate(params) if sampling.temperature > 0 and (limits[i] < vocab or sampling.top_p < 1)
    ]
    # In most rows a few tokens hold nearly all probability, and topk takes at most a tenth of a full sort.
    count = max(_NUM_CANDIDATES, *(limits[i] for i in cut if limits[i] < vocab), 0)
    if not _reads_cheaply(logits.device) and any(limits[i] > count for i in cut):
        count = vocab
    while cut:
        rows = _copied(cut, logits.device)
        limit = _copied([limits[i] for i in cut], logits.device).unsqueeze(-1)
        top_p = _copied([params[i].top_p for i in cut], logits.device).unsqueeze(-1)
        kept, is_complete = _top(logits[rows], limit, top_p, min(count, vocab))
        logits[rows] = kept
        if all(limits[i] <= count for i in cut):
            break
        cut = [i for i, complete in zip(cut, is_complete.tolist(), strict=True) if not complete]
        count *= 16


def _top(logits: Tensor, limit: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keep top_k and top_p tokens, searched among the `count` most likely; `count` does not change the result.

    Args:
        logits: [n, vocab]; limit, top_p: [n, 1].

    Returns:
        [n, vocab] with -inf for all others, and per row whether `count` was enough; rows where not are unchanged.
    """
    values, ids = logits.topk(count, -1)
    held = logits.softmax(-1).gather(-1, ids).cumsum(-1)
    is_limited = limit < logits.shape[-1]
    enough = top_p * torch.where(is_limited, held.gather(-1, limit.clamp(max=count) - 1), 1.0)
    enough.masked_fill_(top_p >= 1, float("inf"))
    before = F.pad(held[:, :-1], (1, 0))
    size = ((before < enough) & (torch.arange(count, device=logits.device) < limit)).sum(-1, keepdim=True).clamp(min=1)
    is_complete = (limit <= count) | (held[:, -1:] >= enough)
    last = values.gather(-1, size - 1)
    above, level = logits > last, logits == last
    room = size - above.sum(-1, keepdim=True)
    if not _reads_cheaply(logits.device) or bool((level.sum(-1, keepdim=True) > room).any()):
        level &= level.cumsum(-1) <= room
    return logits.masked_fill(~(above | level) & is_complete, float("-inf")), is_complete.squeeze(-1)
