"""Rule: the needs and the decision of a verification rule, and every rule by its name in the configuration.

To add a rule, write its file with a pure `accept`, and give it a line in `RULES` and its name in
`engine.config.Verification`. A rule elsewhere is named by its import path; `engine.check_rule` tries its law.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.config import import_named
from engine.errors import ConfigError
from engine.protocols import Draft
from engine.sampling.logits import Run
from engine.verification import block, coupled, k_sequential, rejection
from engine.verification.draft_rows import decide_by

Decide = Callable[[Tensor, Sequence[Run], Sequence[Draft], list[int] | None], list[tuple[list[int], list[int]]]]
"""Decides a batch.

Args:
    logits: [n, vocab] per request the tip's row, then a row per draft token; may be changed in place. Empty if a rule
        shares noise, and no row needs shaping or log probabilities.
    drawn: [n] the tokens that the pass drew, if any; right for rows that need no shaping.

Returns:
    Per request, the tokens to commit and the path of accepted nodes, root first.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Decides which draft tokens a round commits, and which token follows them."""

    decide: Decide
    needs_draft_rows: bool = False  # drafts carry the distributions of their tokens, free of the batch's rounding
    shares_noise: bool = False  # the target's pass may draw with the draft's noise, and the draft foresee it
    independent_siblings: bool = False  # else siblings are sampled without replacement


RULES: Mapping[str, Rule] = {
    "coupled": Rule(coupled.decide, shares_noise=True),
    "rejection": Rule(partial(decide_by, rejection.accept), needs_draft_rows=True),
    "block": Rule(partial(decide_by, block.accept), needs_draft_rows=True),
    "k_sequential": Rule(partial(decide_by, k_sequential.accept), needs_draft_rows=True, independent_siblings=True),
}


def rule_of(name: str) -> Rule:
    """Return the rule of a name in `RULES` or of an import path; raise ConfigError if there is none."""
    if ":" not in name:
        return RULES[name]
    rule = import_named("verification", name)
    if not isinstance(rule, Rule):
        raise ConfigError(f"verification is {name!r}, which is {rule!r}; it must be an engine.verification.rule.Rule")
    return rule
