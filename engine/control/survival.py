"""Survival: how likely each draft token of a request is accepted, before it is drafted, and by which of several drafts.

A token's log-odds are its place's log-odds plus its request's offset, which is learned within a few rounds. In a chain,
a token survives if all tokens before it do, too.

Log-odds by place belong to a kind of requests: greedy or sampled, with reshaped distributions or not, copies or not. A
request starts with its kind's log-odds at that time, and only its first draft tokens teach its kind. So endless or
unusual requests of a client hardly affect other requests.

Of several drafts, a request gets the one with the highest upper confidence bound of acceptance (UCB, Auer et al. 2002).
What is known fades, as in discounted UCB (Garivier and Moulines, 0805.3415), so each draft is tried again at times. A
request begins with what first draft tokens taught its salt, so API keys learn nothing from one another.

The choice depends on committed tokens and earlier verdicts alone, as draft lengths do. So given the past, draft tokens
are still samples of the distribution that a rule is told, and texts keep the target's law by every rule. A choice that
looked at drawn tokens or at their coins would break it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np
from numpy.typing import NDArray

from engine.control.acceptance import PRIOR, Acceptance
from engine.protocols import Draft, Request

_MOST_INFO = 20.0
"""Cap of the information in a request's offset, so that the offset follows the text."""
_MOST_TAUGHT = 32
"""Draft tokens of one request that teach its kind. 16, 64 and all: 1.01, 1.00 and 1.00 times the tokens per second of a
load that changes every 40 rounds."""
_DRAFT_INFO, _BOUND, _KEPT = 3.0, 0.5, 0.99
"""Of a request's drafts: the first information, the width of the bound, the information that a round leaves."""
_MOST_SALTS = 64


@dataclass(slots=True)
class History:
    """What is known of a request's copies, or of its other drafts.

    Attributes:
        kind: the acceptance of the request's kind, which its verdicts also teach.
        odds: the log-odds by place that its kind had when the request came.
        of_salt, by_draft: the acceptance of each draft by requests of its salt, and by this one; a place is a draft.
        offset: the request's offset, at place 0.
        num_taught: how many draft tokens were decided.
    """

    kind: Acceptance
    odds: list[float]
    of_salt: Acceptance
    by_draft: Acceptance
    offset: Acceptance = field(default_factory=lambda: Acceptance([0.5], info=0.5, most_info=_MOST_INFO))
    num_taught: int = 0


class Survival:
    """The histories of running requests, and the acceptance of each kind."""

    def __init__(self, num_draft_tokens: int, num_chains: int = 0, num_drafts: int = 1) -> None:
        """Start without knowledge.

        Args:
            num_chains: 0 if drafts are chains, 1 if they are trees with the best node first. For trees of several
                chains from the tip, with a node of each chain in turn, the number of chains.
            num_drafts: how many drafts there are.
        """
        self._num_drafts = num_drafts
        self._salts: OrderedDict[tuple[bytes, bool], Acceptance] = OrderedDict()
        self._num_chains = num_chains
        width, places = max(1, num_chains), range(max(1, num_draft_tokens))
        trees = [PRIOR ** (1 + node // width) * (1 - PRIOR) ** (node % width) for node in places]
        self._rates = trees if num_chains else [PRIOR for _ in places]
        self._kinds: dict[tuple[bool, ...], Acceptance] = {}
        self._recent: dict[tuple[str, bool], History] = {}
        self._older: dict[tuple[str, bool], History] = {}

    def history(self, request: Request, *, is_copy: bool = False) -> History:
        """Return a request's history, which begins with its kind's log-odds."""
        key = request.request_id, is_copy
        history = self._recent.get(key) or self._older.get(key)
        if history is None:
            kind, of_salt = self._kind_of(request, is_copy), self._of_salt(request, is_copy)
            by_draft = Acceptance([of_salt.rate(index) for index in range(self._num_drafts)], info=_DRAFT_INFO)
            history = History(kind, list(kind.odds), of_salt, by_draft)
        self._recent[key] = history
        return history

    def choose_draft(self, request: Request) -> int:
        """Return which draft is to draft for a request in this round."""
        by_draft = self.history(request).by_draft
        return max(range(self._num_drafts), key=lambda index: by_draft.bound(index, _BOUND))

    def forget(self) -> None:
        """Forget the histories that were not asked for since the last call."""
        self._older, self._recent = self._recent, {}

    def chances(self, histories: Sequence[History], length: int) -> NDArray[np.float64]:
        """Return the survival of each token of future drafts, [n, length]."""
        odds = np.array([history.odds for history in histories]).reshape(-1, len(self._rates))
        offsets = np.array([history.offset.odds for history in histories]).reshape(-1, 1)
        places = np.minimum(np.arange(length), len(self._rates) - 1)
        rates: NDArray[np.float64] = 1 / (1 + np.exp(-odds[:, places] - offsets))
        if not self._num_chains:
            return rates.cumprod(1)
        for node in range(self._num_chains, length):
            np.minimum(rates[:, node], rates[:, node - self._num_chains], out=rates[:, node])
        return rates

    def observe(self, history: History, draft: Draft, path: Sequence[int], draft_index: int = 0) -> None:
        """Learn from a verdict on tokens of the draft with this index; `path` holds the accepted nodes."""
        kept = set(path)
        history.by_draft.fade(_KEPT)
        tip, teaches = path[-1] if path else -1, history.num_taught < _MOST_TAUGHT
        for accepted in [True] * len(path) + [False] * (tip in draft.parents):
            history.by_draft.observe(draft_index, accepted=accepted)
            if teaches:
                history.of_salt.observe(draft_index, accepted=accepted)
        decided = [node for node, parent in enumerate(draft.parents) if parent in kept or parent < 0]
        for node in range(len(draft.parents)) if self._num_chains else decided:
            place = min(node, len(history.odds) - 1)
            rate = 1 / (1 + exp(-history.odds[place] - history.offset.odds[0]))
            error, info = (node in kept) - rate, rate * (1 - rate)
            history.offset.learn(0, error, info)
            if teaches:
                history.kind.learn(place, error, info)
        history.num_taught += len(decided)

    def _of_salt(self, request: Request, is_copy: bool) -> Acceptance:
        key = request.salt, is_copy
        of_salt = self._salts.setdefault(key, Acceptance([PRIOR] * self._num_drafts))
        self._salts.move_to_end(key)
        if len(self._salts) > _MOST_SALTS:
            self._salts.popitem(last=False)
        return of_salt

    def _kind_of(self, request: Request, is_copy: bool) -> Acceptance:
        params = request.params
        is_reshaped = params.depends_on_path or bool(params.logit_bias) or params.temperature > 1
        rates = [PRIOR] * len(self._rates) if is_copy else self._rates
        return self._kinds.setdefault((is_copy, params.temperature == 0, is_reshaped), Acceptance(rates))
