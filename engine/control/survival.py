"""Survival: how likely each draft token of a request is accepted, before it is drafted.

A token's log-odds are those of its place in the draft, plus an offset of its request, which the request's verdicts
teach within a few rounds. A chain's token survives if all tokens before it do.

Requests of a kind (greedy or sampled, with parameters that reshape the rows or not, copies or not) share the log-odds
by place. A request keeps those that it began with, and teaches its kind a bounded amount, so a client's endless or
hopeless requests do not move another's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np
from numpy.typing import NDArray

from engine.control.acceptance import PRIOR, Acceptance
from engine.protocols import Draft, Request

_MOST_INFO = 20.0
"""Information in a request's offset at most, so that it follows its text."""
_MOST_TAUGHT = 32
"""Draft tokens of one request that teach its kind. 16, 64 and all: 1.01, 1.00 and 1.00 times the tokens per second of a
load that changes every 40 rounds."""


@dataclass(slots=True)
class History:
    """What is known of one request's drafts of one source.

    Attributes:
        kind: what it shares with others.
        odds: log-odds by place, as its kind had them when the request came.
        offset: what it adds to them, at place 0.
        num_taught: how many of its draft tokens were decided.
    """

    kind: Acceptance
    odds: list[float]
    offset: Acceptance = field(default_factory=lambda: Acceptance([0.5], info=0.5, most_info=_MOST_INFO))
    num_taught: int = 0


class Survival:
    """The histories of running requests, and what their kinds have in common."""

    def __init__(self, num_draft_tokens: int, num_chains: int = 0) -> None:
        """Know nothing yet of drafts with so many tokens.

        Args:
            num_chains: 0 if drafts are chains. Trees whose first n nodes are the tree of n nodes have 1 if their nodes
                come the best first, or so many chains from the tip, a node of each in turn.
        """
        self._num_chains = num_chains
        width, places = max(1, num_chains), range(max(1, num_draft_tokens))
        trees = [PRIOR ** (1 + node // width) * (1 - PRIOR) ** (node % width) for node in places]
        self._rates = trees if num_chains else [PRIOR for _ in places]
        self._kinds: dict[tuple[bool, ...], Acceptance] = {}
        self._recent: dict[tuple[str, bool], History] = {}
        self._older: dict[tuple[str, bool], History] = {}

    def history(self, request: Request, *, is_copy: bool = False) -> History:
        """Return a request's history; it begins with what its kind has."""
        key = request.request_id, is_copy
        history = self._recent.get(key) or self._older.get(key)
        if history is None:
            kind = self._kind_of(request, is_copy)
            history = History(kind, list(kind.odds))
        self._recent[key] = history
        return history

    def forget(self) -> None:
        """Forget the requests that nobody has asked for since the last call."""
        self._older, self._recent = self._recent, {}

    def chances(self, histories: Sequence[History], length: int) -> NDArray[np.float64]:
        """Return the survival of each token of drafts that are not made yet, [n, length]."""
        odds = np.array([history.odds for history in histories]).reshape(-1, len(self._rates))
        offsets = np.array([history.offset.odds for history in histories]).reshape(-1, 1)
        places = np.minimum(np.arange(length), len(self._rates) - 1)
        rates: NDArray[np.float64] = 1 / (1 + np.exp(-odds[:, places] - offsets))
        if not self._num_chains:
            return rates.cumprod(1)
        for node in range(self._num_chains, length):
            np.minimum(rates[:, node], rates[:, node - self._num_chains], out=rates[:, node])
        return rates

    def observe(self, history: History, draft: Draft, path: Sequence[int]) -> None:
        """Learn from a verdict on a draft: the `path` of accepted nodes."""
        kept = set(path)
        decided = [node for node, parent in enumerate(draft.parents) if parent in kept or parent < 0]
        for node in range(len(draft.parents)) if self._num_chains else decided:
            place = min(node, len(history.odds) - 1)
            rate = 1 / (1 + exp(-history.odds[place] - history.offset.odds[0]))
            error, info = (node in kept) - rate, rate * (1 - rate)
            history.offset.learn(0, error, info)
            if history.num_taught < _MOST_TAUGHT:
                history.kind.learn(place, error, info)
        history.num_taught += len(decided)

    def _kind_of(self, request: Request, is_copy: bool) -> Acceptance:
        params = request.params
        is_reshaped = params.depends_on_path or bool(params.logit_bias) or params.temperature > 1
        rates = [PRIOR] * len(self._rates) if is_copy else self._rates
        return self._kinds.setdefault((is_copy, params.temperature == 0, is_reshaped), Acceptance(rates))
