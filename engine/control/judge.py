"""Judge: whether drafts paid, by the times and tokens of past rounds; `budget` predicts it for the next."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_LOW_ACCEPTANCE = 0.15
_MIN_ROUNDS = 50
"""Fewer rounds are not judged."""
WHY_PLAIN: Mapping[str, str] = {
    "off": "speculation is off, or there is no draft; serve with a draft_model and speculation=adaptive",
    "request": "the requests turn it off; leave `speculative` out of requests",
    "goodput": "adaptive speculation measured that they do not pay; try a smaller draft, or fewer requests at once",
    "trial": "other lengths are being tried; measure again later",
}
"""Why rounds have no draft, and what to do, by `Plan.reason`."""
PROBLEMS: Mapping[str, str] = {
    "low_acceptance": "few draft tokens are accepted; take a draft of the target's family, trained alike",
    "unused": "a draft is loaded, and none is used; the Router's log says why",
    "costs_more": "drafts cost more than they bring at this load; use speculation=adaptive, or a smaller draft",
}
"""What can be wrong with drafts, and what to do."""


class Rounds(NamedTuple):
    """Totals over rounds; `plain` and `lost` count rounds without drafts and rounds with lost drafts, by reason."""

    num_rounds: float
    seconds: float
    draft_wait_s: float
    target_s: float
    num_draft_tokens: float
    num_accepted: float
    num_tokens: float
    plain: Counter[str]
    lost: Counter[str]


def speed_up(num_tokens: float, num_accepted: float, seconds: float, plain_s: float) -> float:
    """Return the factor by which drafts change tokens per second; as many rounds without drafts take `plain_s`."""
    return num_tokens / max(1.0, num_tokens - num_accepted) * plain_s / max(1e-9, seconds)


def problems(rounds: Rounds) -> dict[str, str]:
    """Return the `PROBLEMS` that rounds have, with figures."""
    drafted, accepted, plain, lost = rounds.num_draft_tokens, rounds.num_accepted, rounds.plain, rounds.lost
    faults: dict[str, str] = {}
    if rounds.num_rounds < _MIN_ROUNDS:
        return faults
    if not drafted:
        why = WHY_PLAIN[plain.most_common(1)[0][0]] if plain.total() else "none was proposed; read its log"
        if lost.total() > plain.total():
            why = f"its worker did not answer ({lost.most_common(1)[0][0]}); read its log"
        faults["unused"] = f"a draft is loaded, and none was used in {rounds.num_rounds:.0f} rounds: {why}"
    elif accepted < _LOW_ACCEPTANCE * drafted:
        faults["low_acceptance"] = f"{accepted / drafted:.0%} of {drafted:.0f}: {PROBLEMS['low_acceptance']}"
    # In alternation, the wait for drafts costs nothing while the target computes.
    factor = speed_up(
        rounds.num_tokens, accepted, rounds.seconds, max(rounds.seconds - rounds.draft_wait_s, rounds.target_s)
    )
    if 2 * plain["goodput"] > rounds.num_rounds:
        faults["costs_more"] = f"{PROBLEMS['costs_more']}: {WHY_PLAIN['goodput']}"
    elif drafted and factor < 1:
        faults["costs_more"] = f"{PROBLEMS['costs_more']}: they make {factor:.2f} times the tokens per second"
    return faults
