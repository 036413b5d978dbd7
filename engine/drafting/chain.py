"""Chain: the draft tokens of one request as they are drawn, with what each of them was drawn from."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocols import Draft, chain


@dataclass(frozen=True, slots=True)
class Ranking:
    """What is likely to be committed next: the higher a token's score, the likelier.

    Attributes:
        scores: [n, m].
        token_ids: [n, m] the tokens that the scores belong to; None where column i is token i.
    """

    scores: Tensor
    token_ids: Tensor | None = None

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the highest scores of each row and their tokens, [n, count] each, the best first."""
        scores, ids = self.scores.topk(min(count, self.scores.shape[-1]), -1)
        return scores, ids if self.token_ids is None else self.token_ids.gather(-1, ids)


class RankedRow(NamedTuple):
    """One row of a ranking, which is not copied until it is needed."""

    ranking: Ranking
    row: int


def joined(rows: Sequence[RankedRow]) -> Ranking:
    """Return the ranking of these rows, in their order; all of them have `token_ids`, or none has."""
    rankings = {id(ranking): ranking for ranking, _ in rows}
    members: dict[int, list[int]] = {key: [] for key in rankings}
    places = []
    for ranking, row in rows:
        places.append((id(ranking), len(members[id(ranking)])))
        members[id(ranking)].append(row)
    starts = dict(zip(rankings, itertools.accumulate(map(len, members.values()), initial=0), strict=False))
    order = [starts[key] + place for key, place in places]
    scores = torch.cat([ranking.scores[members[key]] for key, ranking in rankings.items()])[order]
    ids = [ranking.token_ids[members[key]] for key, ranking in rankings.items() if ranking.token_ids is not None]
    return Ranking(scores, torch.cat(ids)[order] if ids else None)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one forward pass drew, still on the device.

    Attributes:
        tokens: [n].
        top: [n, m] ids and [n, m] probabilities that the tokens were sampled from; for rules that need draft rows.
        ranking: one row per token: what may be committed in its place; for running ahead.
    """

    tokens: Tensor
    top: tuple[Tensor, Tensor] | None = None
    ranking: Ranking | None = None


@dataclass(slots=True)
class Chain:
    """One request's draft tokens; `top_ids`, `top_probs` and `rankings` are per token, or empty."""

    token_ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_probs: list[list[float]] = field(default_factory=list)
    rankings: list[RankedRow] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.token_ids[length:], self.top_ids[length:], self.top_probs[length:], self.rankings[length:]

    def draft(self) -> Draft:
        """Return the chain as it is sent to the target."""
        draft = chain(list(self.token_ids))
        if not self.top_ids:
            return draft
        return Draft(draft.token_ids, draft.parents, list(self.top_ids), list(self.top_probs))


def extend(chains: Sequence[Chain], drawn: Sequence[Drawn], rows: Sequence[int], counts: Sequence[int]) -> None:
    """Append the first `counts[i]` tokens drawn for row `rows[i]` to chain i; rankings stay on the device."""
    if not drawn:
        return
    tokens = torch.stack([step.tokens for step in drawn], 1).tolist()
    tops = [step.top for step in drawn if step.top is not None]
    ids = torch.stack([top[0] for top in tops], 1).tolist() if tops else []
    probs = torch.stack([top[1] for top in tops], 1).tolist() if tops else []
    rankings = [step.ranking for step in drawn if step.ranking is not None]
    for extended, row, count in zip(chains, rows, counts, strict=True):
        extended.token_ids += tokens[row][:count]
        if tops:
            extended.top_ids += ids[row][:count]
            extended.top_probs += probs[row][:count]
        extended.rankings += [RankedRow(ranking, row) for ranking in rankings[:count]]
