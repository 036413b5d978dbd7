"""Judge: does the draft pay, by what rounds took and committed? Whoever says whether it does asks here.

Before a round, the planner asks the same of its expectations: see `budget`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

_LOW_ACCEPTANCE = 0.15
_MIN_ROUNDS = 50
"""Of fewer rounds nothing is said."""
WHY_PLAIN: Mapping[str, str] = {
    "off": "speculation is off, or there is no draft; serve with a draft_model and speculation=adaptive",
    "request": "the requests turn it off; leave `speculative` out of requests",
    "goodput": "adaptive speculation measured that they do not pay; try a smaller draft, or fewer requests at once",
    "trial": "other lengths are being tried; measure again later",
}
"""Why rounds have no draft, and what to do, by the reason that a plan gives for its length."""
PROBLEMS: Mapping[str, str] = {
    "low_acceptance": "few draft tokens are accepted; take a draft of the target's family, trained alike",
    "unused": "a draft is loaded, and none is used; the Router's log says why",
    "costs_more": "drafts cost more than they bring at this load; use speculation=adaptive, or a smaller draft",
}
"""What can be wrong with drafts, and what to do."""


class Rounds(NamedTuple):
    """Counts of rounds, which grow; `plain` are rounds without drafts by reason, `lost` those whose drafts were."""

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
    """Return what drafts multiply tokens per second by, given what as many rounds without them take."""
    return num_tokens / max(1.0, num_tokens - num_accepted) * plain_s / max(1e-9, seconds)


def problems(rounds: Rounds) -> dict[str, str]:
    """Return what is wrong with the drafts of some rounds, of `PROBLEMS`, with figures."""
    drafted, accepted, plain, lost = rounds.num_draft_tokens, rounds.num_accepted, rounds.plain, rounds.lost
    found: dict[str, str] = {}
    if rounds.num_rounds < _MIN_ROUNDS:
        return found
    if not drafted:
        why = WHY_PLAIN[plain.most_common(1)[0][0]] if plain.total() else "none was proposed; read its log"
        if lost.total() > plain.total():
            why = f"its worker did not answer ({lost.most_common(1)[0][0]}); read its log"
        found["unused"] = f"a draft is loaded, and none was used in {rounds.num_rounds:.0f} rounds: {why}"
    elif accepted < _LOW_ACCEPTANCE * drafted:
        found["low_acceptance"] = f"{accepted / drafted:.0%} of {drafted:.0f}: {PROBLEMS['low_acceptance']}"
    # While two cohorts alternate, rounds wait for drafts as the target computes; that costs nothing.
    factor = speed_up(
        rounds.num_tokens, accepted, rounds.seconds, max(rounds.seconds - rounds.draft_wait_s, rounds.target_s)
    )
    if 2 * plain["goodput"] > rounds.num_rounds:
        found["costs_more"] = f"{PROBLEMS['costs_more']}: {WHY_PLAIN['goodput']}"
    elif drafted and factor < 1:
        found["costs_more"] = f"{PROBLEMS['costs_more']}: they make {factor:.2f} times the tokens per second"
    return found
