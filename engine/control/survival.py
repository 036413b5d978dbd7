"""Survival: how likely each draft token of a request is accepted, before it is drafted.

A token's log-odds are those of its place in the draft. To these, the request adds an offset of its own, which its
verdicts teach within a few rounds. A chain's token survives if all tokens before it do.

Requests of a kind (greedy or sampled, with parameters that reshape the rows or not, copies or not) share the log-odds
by place, which a request takes over when it comes and then teaches for itself. Each request may teach its kind a
bounded amount, so a client's endless or hopeless requests do not move another's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp, log
from operator import mul

from engine.protocols import Draft, Request

_PRIOR = 0.7
"""Acceptance of a token before anything is known."""
_PRIOR_INFO = 0.5
_MOST_INFO = 20.0
"""Information (the sum of p (1 - p)) in the offset of a request: at first, and at most, so that it follows its text."""
_PLACE_INFO = 30.0
_FADING = 0.999
_KIND_INFO = 2.0
_MOST_KIND_INFO = 60.0
_MOST_TAUGHT = 32
"""Tokens of one request that count whole for its kind; all later ones together count as many again."""
_LEAST_WEIGHT = 0.01
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Prior:
    """How likely the tokens of a draft are accepted before anything is known.

    Attributes:
        gains: the probability of each.
        num_chains: 0 if drafts are chains. Trees whose first n nodes are the tree of n nodes have 1 if their nodes come
            the best first, or so many chains from the tip, a node of each in turn.
    """

    gains: Sequence[float]
    num_chains: int = 0

    @classmethod
    def of(cls, num_draft_tokens: int, num_chains: int = 0) -> "Prior":
        """Return the prior of drafts with so many tokens."""
        width, rejected = max(1, num_chains), 1 - _PRIOR
        places = range(num_draft_tokens)
        return cls([_PRIOR ** (1 + node // width) * rejected ** (node % width) for node in places], num_chains)


@dataclass(slots=True)
class _Kind:
    """Log-odds by place of the requests of a kind, and the information in each."""

    places: list[float]
    infos: list[float]

    def learn(self, place: int, error: float, info: float) -> None:
        """Move towards an outcome: `error` is outcome less prediction, `info` the prediction's variance, weighted."""
        self.infos[place] = min(self.infos[place] + info, _MOST_KIND_INFO)
        self.places[place] += error / self.infos[place]


@dataclass(slots=True)
class _Offset:
    """What a request adds to log-odds."""

    value: float = 0.0
    info: float = _PRIOR_INFO

    def learn(self, error: float, info: float) -> None:
        self.info = min(self.info + info, _MOST_INFO)
        self.value += error / self.info

    def fade(self) -> None:
        """Trust it less, in a round without a draft: the text may have changed since the last one."""
        self.info = max(_PRIOR_INFO, _FADING * self.info)
        self.value *= _FADING


@dataclass(slots=True)
class History:
    """What is known of one request's drafts of one source.

    Attributes:
        places: its log-odds by place.
        is_copy: whether its drafts are copies.
        offset: what it adds to them.
        num_taught: how many of its draft tokens were decided.
        due, pause: the round in which it is tried again if no draft pays, and how many rounds the next wait takes.
        seen: the last round that planned a draft for it.
    """

    kind: _Kind
    places: list[float]
    is_copy: bool = False
    offset: _Offset = field(default_factory=_Offset)
    num_taught: int = 0
    due: int = 0
    pause: int = 1
    seen: int = 0


class Survival:
    """The histories of running requests, and what their kinds have in common."""

    def __init__(self, prior: Prior) -> None:
        self._num_chains = prior.num_chains
        gains = [1.0, *prior.gains]
        rates = prior.gains if prior.num_chains else [here / before for before, here in pairwise(gains)]
        self._prior = [_log_odds(rate) for rate in rates] or [0.0]
        self._kinds: dict[tuple[bool, ...], _Kind] = {}
        self._histories: dict[tuple[str, bool], History] = {}

    def history(self, request: Request, now: int, *, is_copy: bool = False) -> History:
        """Return a request's history in round `now`; it begins with what its kind has."""
        key = request.request_id, is_copy
        history = self._histories.get(key)
        if history is None:
            kind = self._kind_of(request, is_copy)
            history = self._histories[key] = History(kind, list(kind.places), is_copy)
        history.seen = now
        return history

    def forget(self, before: int) -> None:
        """Forget the requests that were seen in no round from `before` on."""
        self._histories = {key: history for key, history in self._histories.items() if history.seen >= before}

    def chances(self, history: History, length: int) -> list[float]:
        """Return the survival of each token of a draft of so many that is not made yet."""
        places, offset = history.places, history.offset.value
        rates = [1 / (1 + exp(-place - offset)) for place in places[:length]]
        rates += rates[-1:] * (length - len(rates))
        if not self._num_chains:
            return list(accumulate(rates, mul))
        for node in range(self._num_chains, length):
            rates[node] = min(rates[node], rates[node - self._num_chains])
        return rates

    def observe(self, history: History, draft: Draft, path: Sequence[int]) -> None:
        """Learn from a verdict on a draft: the `path` of accepted nodes."""
        weight = min(1.0, (_MOST_TAUGHT / max(1, history.num_taught)) ** 2)
        kept = set(path)
        decided = [node for node, parent in enumerate(draft.parents) if parent in kept or parent < 0]
        history.num_taught += len(decided)
        for node in range(len(draft.parents)) if self._num_chains else decided:
            place = min(node, len(history.places) - 1)
            rate = 1 / (1 + exp(-history.places[place] - history.offset.value))
            error, info = (node in kept) - rate, rate * (1 - rate)
            history.offset.learn(error, info)
            history.places[place] += error / _PLACE_INFO
            if weight > _LEAST_WEIGHT:
                history.kind.learn(place, weight * error, weight * info)

    def _kind_of(self, request: Request, is_copy: bool) -> _Kind:
        params = request.params
        is_reshaped = params.depends_on_path or bool(params.logit_bias) or params.temperature > 1
        key = is_copy, params.temperature == 0, is_reshaped
        if key not in self._kinds:
            prior = [_log_odds(_PRIOR)] * len(self._prior) if is_copy else self._prior
            places = [*prior, prior[-1]]
            self._kinds[key] = _Kind(places, [_KIND_INFO] * len(places))
        return self._kinds[key]


def _log_odds(rate: float) -> float:
    rate = min(max(rate, _EPSILON), 1 - _EPSILON)
    return log(rate / (1 - rate))
