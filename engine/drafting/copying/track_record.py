"""TrackRecord: how often tokens that followed a match were accepted, by the length of the match."""

from dataclasses import dataclass

_PRIORS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Acceptance rates of matches of 1 to 3, 4 to 7, 8 to 15, 16 to 31 and 32 tokens or more, before any was observed."""
_PRIOR_COUNT = 8
_REMEMBERED = 200
_SKIPS_FORGIVEN = 500


@dataclass(slots=True)
class _Rate:
    prior: float
    value: float
    count: int = _PRIOR_COUNT

    def observe(self, *, accepted: bool) -> None:
        self.count = min(self.count + 1, _REMEMBERED)
        self.value += (accepted - self.value) / self.count


class TrackRecord:
    """Acceptance rates of recent drafts, by length of match: long ones go on more often, and some texts copy more."""

    def __init__(self) -> None:
        self._rates = [_Rate(prior, prior) for prior in _PRIORS]

    def rate(self, match_length: int) -> float:
        """Return how likely a token is accepted that followed such a match, if all before it were."""
        return self._rate(match_length).value

    def observe(self, match_length: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Record a verdict. Tokens after the first rejected one were not decided."""
        for i in range(min(num_accepted + 1, num_draft_tokens)):
            self._rate(match_length + i).observe(accepted=i < num_accepted)

    def observe_skip(self, match_length: int) -> None:
        """Record that a match was not used, so that it is tried again after a while."""
        rate = self._rate(match_length)
        rate.value += (rate.prior - rate.value) / _SKIPS_FORGIVEN

    def _rate(self, match_length: int) -> _Rate:
        return self._rates[min(max((match_length >> 1).bit_length() - 1, 0), len(_PRIORS) - 1)]
