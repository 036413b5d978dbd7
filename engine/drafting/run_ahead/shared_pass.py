"""Shared passes: passes of several drafters, if over one model and one cache, launched as a single pass.

A small model's pass mostly reads its weights, so several drafters' passes together take little longer than a single
pass.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafting.model.next_tokens import Ranking
from engine.drafting.model.token_drawer import Drawn
from engine.drafting.run_ahead.passes import Pass, PassesAhead
from engine.execution.attention import Group, PagedContext
from engine.execution.batch import ForwardBatch
from engine.sampling.noise import Draws
from engine.stats.preparation import PREPARATION


def advance_together(drafters: Sequence[PassesAhead], max_rows: int) -> None:
    """Launch the first drafter's next pass together with other drafters' passes, of at most `max_rows` in all.

    If a drafter launches its pass itself, nothing else is launched. No pass may be under way, and the caches must be
    settled.
    """
    clock = drafters[0].clock
    started, num_prepared = clock(), PREPARATION.counts.total()
    with torch.inference_mode():
        sharing: list[tuple[PassesAhead, Pass]] = []
        for drafter in drafters:
            num_forwards = drafter.stats.num_forwards
            next_pass = drafter.next_pass()
            if drafter.stats.num_forwards > num_forwards:
                return
            if next_pass is not None and _fits(next_pass, [joining for _, joining in sharing], max_rows):
                sharing.append((drafter, next_pass))
        if sharing:
            drawn = run_together([next_pass for _, next_pass in sharing])
            for (drafter, next_pass), pass_draws in zip(sharing, drawn, strict=True):
                next_pass.take(pass_draws)
                drafter.note_launch(started, num_prepared)


def run_together(passes: Sequence[Pass]) -> list[Drawn]:
    """Launch passes together, and return each pass's draws; all must have the same `_shape`."""
    if len(passes) == 1:
        return [passes[0].run()]
    draws = [joining.draws for joining in passes if joining.draws is not None]
    counts = [len(joining.batch.logit_indices) for joining in passes]
    drawn = passes[0].drawer.run(_joined([joining.batch for joining in passes]), _joined_draws(draws), list)
    tokens, ranking = torch.split(drawn.tokens, counts), drawn.ranking
    if ranking is None:
        return [Drawn(pass_tokens) for pass_tokens in tokens]
    ids = [None] * len(counts) if ranking.token_ids is None else torch.split(ranking.token_ids, counts)
    rankings = [Ranking(*pair) for pair in zip(torch.split(ranking.scores, counts), ids, strict=True)]
    return [Drawn(pass_tokens, None, ranked) for pass_tokens, ranked in zip(tokens, rankings, strict=True)]


def _fits(candidate: Pass, others: Sequence[Pass], max_rows: int) -> bool:
    if not others:
        return True
    shapes = {_shape(joining) for joining in (candidate, *others)}
    num_rows = sum(group.rows for joining in (candidate, *others) for group in joining.batch.paged.groups)
    return None not in shapes and len(shapes) == 1 and num_rows <= max_rows


def _shape(candidate: Pass) -> tuple[int, bool, int] | None:
    """Return what passes must have in common to be launched together; None if a pass cannot be shared."""
    (group, *other_groups), batch = candidate.batch.paged.groups, candidate.batch
    if other_groups or candidate.draws is None or batch.added is not None:
        return None
    if group.is_prompt_start or group.added is not None:
        return None
    return group.length, group.extra is None, id(batch.paged.kv)  # a model's own


def _joined(batches: Sequence[ForwardBatch]) -> ForwardBatch:
    groups = [batch.paged.groups[0] for batch in batches]
    starts = accumulate((len(batch.token_ids) for batch in batches), initial=0)
    indices = [batch.logit_indices + start for batch, start in zip(batches, starts, strict=False)]
    extra = [group.extra for group in groups if group.extra is not None]
    group = Group(
        start=0,
        rows=sum(group.rows for group in groups),
        length=groups[0].length,
        blocks=_stacked([group.blocks for group in groups]),
        positions=torch.cat([group.positions for group in groups]),
        places=torch.cat([group.places for group in groups]),
        limits=torch.cat([group.limits for group in groups]),
        extra=_stacked(extra) if extra else None,
    )
    kv = batches[0].paged.kv
    # Tokens of a drafter's first pass are on the host, later tokens on the device.
    tokens = torch.cat([batch.token_ids.to(kv.keys[0].device, non_blocking=True) for batch in batches])
    return ForwardBatch(tokens, torch.cat(indices), PagedContext(kv, [group]))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Pad to one width with zeros: block 0, or place 0, to which every token attends anyway."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors])


def _joined_draws(draws: Sequence[Draws]) -> Draws:
    firsts = accumulate((len(draw.keys) for draw in draws), initial=0)
    rows = [torch.where(draw.rows > 0, draw.rows + first, 0) for draw, first in zip(draws, firsts, strict=False)]
    return Draws(
        torch.cat([draw.temperatures for draw in draws]), torch.cat([draw.keys for draw in draws]), torch.cat(rows)
    )
