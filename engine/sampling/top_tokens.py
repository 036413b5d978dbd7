"""top_k and top_p, searched among the likeliest tokens first: most rows need few, and sorting all is slow."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.params import SamplingParams

_NUM_CANDIDATES = 256


def keep_top(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep each row's top_k tokens, then the fewest that sum to top_p, in place; ties go to lower ids.

    logits: [n, vocab]. Greedy rows are skipped, because the most likely token is always kept.
    """
    vocab = logits.shape[-1]
    limits = [sampling.top_k if 0 < sampling.top_k < vocab else vocab for sampling in params]
    cut = [
        i for i, sampling in enumerate(params) if sampling.temperature > 0 and (limits[i] < vocab or sampling.top_p < 1)
    ]
    # In most rows a few tokens hold nearly all probability, and topk takes at most a tenth of a full sort.
    count = max(_NUM_CANDIDATES, *(limits[i] for i in cut if limits[i] < vocab), 0)
    if not _reads_cheaply(logits.device) and any(limits[i] > count for i in cut):
        count = vocab
    while cut:
        rows = copied(cut, logits.device)
        limit = copied([limits[i] for i in cut], logits.device).unsqueeze(-1)
        top_p = copied([params[i].top_p for i in cut], logits.device).unsqueeze(-1)
        kept, is_complete = top(logits[rows], limit, top_p, min(count, vocab))
        logits[rows] = kept
        if all(limits[i] <= count for i in cut):
            break
        cut = [i for i, complete in zip(cut, is_complete.tolist(), strict=True) if not complete]
        count *= 16


def copied(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers to a device without waiting for its queued work."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def top(logits: Tensor, limit: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Keep top_k and top_p tokens, searched among the `count` most likely; other logits become -inf.

    Returns [n, vocab], and per row whether `count` was enough; if not, the row is unchanged. limit, top_p: [n, 1].
    """
    values, ids = logits.topk(count, -1)
    # A GPU's order of addition depends on the number of rows; in float64 that changes no token.
    held = logits.softmax(-1).gather(-1, ids).cumsum(-1, dtype=torch.float64)
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


def _reads_cheaply(device: torch.device) -> bool:
    """Return whether the host reads results cheaply; on a GPU it waits for all queued work."""
    return device.type == "cpu"
