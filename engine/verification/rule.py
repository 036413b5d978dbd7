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
    logits: [n, vocab] per request the tip's row, then one row per draft token; may be changed in place. Empty if a
        rule shares noise, and no row needs shaping or log probabilities.
    runs: one per request, for its rows.
    drafts: one per request.
    drawn: [n] the tokens that the pass drew, if it drew any; right for rows that need no shaping.

Returns:
    Per request, the tokens to commit and the path of accepted nodes, root first.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Decides which draft tokens a round commits, and which token follows them.

    Attributes:
        decide: the decision; `draft_rows.decide_by` makes one of an `accept` function.
        needs_draft_rows: drafts must carry the distributions that their tokens were sampled from. Then no number of the
            draft may depend on its batch; else its rounding never changes a text.
        shares_noise: the target draws a token at every row with the noise that the draft drew with. The target's pass
            may then draw these tokens itself, and the draft can foresee them.
        independent_siblings: draft tokens after the same text must be sampled independently; else without replacement.
    """

    decide: Decide
    needs_draft_rows: bool = False
    shares_noise: bool = False
    independent_siblings: bool = False


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
