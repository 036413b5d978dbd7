"""Survival: how likely each draft token of a request is accepted, before and after it was drafted.

Before drafting, a token's log-odds are those of its place in the draft. After it, they are the drafter's own
confidence, through a calibration. To both, the request adds an offset of its own, which its verdicts teach within a
few rounds. A chain's token survives if all tokens before it do; a tree's, if those on its path do.

Requests of a kind (greedy or sampled, with parameters that reshape the rows or not, copies or not) share two curves:
the log-odds by place, which a request takes over when it comes and then teaches for itself, and the calibration. Each
request may teach them a bounded amount, so a client's endless or hopeless requests do not move another's.
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
_CURVE_INFO = 2.0
_MOST_CURVE_INFO = 60.0
_MOST_TAUGHT = 32
"""Tokens of one request that count whole for its kind's curves; all later ones together count as many again."""
_LEAST_WEIGHT = 0.01
_LOWEST, _HIGHEST = -4, 6
"""Range of the calibration's knots, in log-odds of a confidence, one apart."""
_EPSILON = 1e-6
_BINS = 10


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
class Reliability:
    """Predicted and actual acceptance, by bins of the prediction from 0 to 1; they only grow.

    Attributes:
        counts: [10] decided draft tokens whose acceptance, given that of their parents, was predicted to be in the bin.
        predicted: [10] the sums of their predictions.
        accepted: [10] how many of them were accepted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * _BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * _BINS)

    def observe(self, predicted: float, *, accepted: bool) -> None:
        """Count one draft token."""
        place = min(int(_BINS * predicted), _BINS - 1)
        self.counts[place] += 1
        self.predicted[place] += predicted
        self.accepted[place] += accepted

    @property
    def error(self) -> float:
        """The mean distance of predicted and actual acceptance over bins, weighted by their counts."""
        distances = (abs(sure - kept) for sure, kept in zip(self.predicted, self.accepted, strict=True))
        return sum(distances) / max(1, sum(self.counts))


class Curve:
    """Log-odds at knots 0, 1, ..., linear between them, learned from single outcomes."""

    def __init__(self, values: Sequence[float], *, rises: bool = False) -> None:
        self.values = list(values)
        self._info = [_CURVE_INFO] * len(self.values)
        self._rises = rises

    def at(self, place: float) -> float:
        """Return the log-odds at a place, which must be in the curve's range."""
        knot = min(int(place), len(self.values) - 2)
        return self.values[knot] + (self.values[knot + 1] - self.values[knot]) * (place - knot)

    def learn(self, place: float, error: float, info: float) -> None:
        """Move towards an outcome: `error` is outcome less prediction, `info` the prediction's variance, weighted."""
        knot = min(int(place), len(self.values) - 2)
        for near, share in ((knot, 1 - place + knot), (knot + 1, place - knot)):
            self._info[near] = min(self._info[near] + share * info, _MOST_CURVE_INFO)
            value = self.values[near] + share * error / self._info[near]
            if self._rises:
                value = max(value, *self.values[max(0, near - 1) : near], -99.0)
                value = min(value, *self.values[near + 1 : near + 2], 99.0)
            self.values[near] = value


@dataclass(slots=True)
class _Kind:
    places: Curve
    confidences: Curve


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
        places: its log-odds by place before drafting.
        is_copy: whether its drafts are copies.
        before, after: its offsets before and after drafting.
        num_taught: how many of its draft tokens were decided.
        due, pause: the round in which it is tried again if no draft pays, and how many rounds the next wait takes.
        seen: the last round that planned a draft for it.
        predicted: log-odds of the nodes of its last draft, those that were cut included.
    """

    kind: _Kind
    places: list[float]
    is_copy: bool = False
    before: _Offset = field(default_factory=_Offset)
    after: _Offset = field(default_factory=_Offset)
    num_taught: int = 0
    due: int = 0
    pause: int = 1
    seen: int = 0
    predicted: list[float] = field(default_factory=list)


class Survival:
    """The histories of running requests, and the curves of their kinds."""

    def __init__(self, prior: Prior) -> None:
        self.reliability = Reliability()
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
            history = self._histories[key] = History(kind, list(kind.places.values), is_copy)
        history.seen = now
        return history

    def forget(self, before: int) -> None:
        """Forget the requests that were seen in no round from `before` on."""
        self._histories = {key: history for key, history in self._histories.items() if history.seen >= before}

    def before(self, history: History, length: int) -> list[float]:
        """Return the survival of each token of a draft of so many that is not made yet."""
        places, offset = history.places, history.before.value
        rates = [1 / (1 + exp(-place - offset)) for place in places[:length]]
        rates += rates[-1:] * (length - len(rates))
        if not self._num_chains:
            return list(accumulate(rates, mul))
        for node in range(self._num_chains, length):
            rates[node] = min(rates[node], rates[node - self._num_chains])
        return rates

    def after(self, history: History, draft: Draft) -> list[float]:
        """Return the survival of each node of a draft, and note the prediction in the history."""
        if draft.confidences is None:
            survival = self.before(history, len(draft.token_ids))
            if self._num_chains:
                for node, parent in enumerate(draft.parents):
                    survival[node] = min(survival[node], survival[parent] if parent >= 0 else 1.0)
            history.predicted = []
            return survival
        curve, offset = history.kind.confidences, history.after.value
        history.predicted = [curve.at(_knot(sure)) + offset for sure in draft.confidences]
        survival = []
        for parent, odds in zip(draft.parents, history.predicted, strict=True):
            survival.append((survival[parent] if parent >= 0 else 1.0) / (1 + exp(-odds)))
        return survival

    def observe(self, history: History, draft: Draft, path: Sequence[int], *, teaches: bool = True) -> None:
        """Learn from a verdict on a draft that may have been cut: the `path` of accepted nodes.

        The calibration learns if the draft was scored, or if it `teaches`.
        """
        predicted, history.predicted = history.predicted, []
        weight = min(1.0, (_MOST_TAUGHT / max(1, history.num_taught)) ** 2)
        kept = set(path)
        decided = [node for node, parent in enumerate(draft.parents) if parent in kept or parent < 0]
        history.num_taught += len(decided)
        if draft.confidences is not None and (teaches or predicted):
            self._learn_confidences(history, draft, [(node, node in kept) for node in decided], weight)
        places: list[tuple[int, float]] = [(node, node in kept) for node in decided]
        if self._num_chains:
            places = [(node, node in kept) for node in range(len(draft.parents))]
        elif len(path) == len(draft.parents) < len(predicted):
            # The first token that was cut counts as predicted; without it, places would look better than they are.
            places.append((len(path), 1 / (1 + exp(-predicted[len(path)]))))
        for node, outcome in places:
            place = min(node, len(history.places) - 1)
            rate = 1 / (1 + exp(-history.places[place] - history.before.value))
            error, info = outcome - rate, rate * (1 - rate)
            history.before.learn(error, info)
            history.places[place] += error / _PLACE_INFO
            if weight > _LEAST_WEIGHT:
                history.kind.places.learn(place, weight * error, weight * info)

    def _learn_confidences(
        self, history: History, draft: Draft, outcomes: Sequence[tuple[int, bool]], weight: float
    ) -> None:
        assert draft.confidences is not None
        curve, offset = history.kind.confidences, history.after
        for node, accepted in outcomes:
            place = _knot(draft.confidences[node])
            rate = 1 / (1 + exp(-curve.at(place) - offset.value))
            self.reliability.observe(rate, accepted=accepted)
            error, info = accepted - rate, rate * (1 - rate)
            offset.learn(error, info)
            if weight > _LEAST_WEIGHT:
                curve.learn(place, weight * error, weight * info)

    def _kind_of(self, request: Request, is_copy: bool) -> _Kind:
        params = request.params
        is_reshaped = params.depends_on_path or bool(params.logit_bias) or params.temperature > 1
        key = is_copy, params.temperature == 0, is_reshaped
        if key not in self._kinds:
            prior = [_log_odds(_PRIOR)] * len(self._prior) if is_copy else self._prior
            identity = Curve(range(_LOWEST, _HIGHEST + 1), rises=True)
            self._kinds[key] = _Kind(Curve([*prior, prior[-1]]), identity)
        return self._kinds[key]


def _log_odds(rate: float) -> float:
    rate = min(max(rate, _EPSILON), 1 - _EPSILON)
    return log(rate / (1 - rate))


def _knot(confidence: float) -> float:
    return min(max(_log_odds(confidence), _LOWEST), _HIGHEST) - _LOWEST
