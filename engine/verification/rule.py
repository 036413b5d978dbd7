"""Rule: what a verification rule needs and decides, and every rule by its name in the configuration.

To add a rule, write its file, and give it a line in `RULES` and its name in `engine.config.Verification`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from engine.protocols import Draft
from engine.sampling.logits import Run
from engine.verification.block import Block
from engine.verification.coupled import Coupled
from engine.verification.k_sequential import KSequential
from engine.verification.rejection import Rejection


class Rule(Protocol):
    """Decides which draft tokens a round commits, and which token follows them.

    Attributes:
        needs_draft_rows: drafts must carry the distributions that their tokens were sampled from.
        shares_noise: the target draws a token at every row with the noise that the draft drew with. The target's pass
            may then draw these tokens itself, and the draft can foresee them.
        independent_siblings: draft tokens after the same text must be sampled independently; else without replacement.
    """

    needs_draft_rows: bool
    shares_noise: bool
    independent_siblings: bool

    def decide(
        self, logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Decide a batch.

        Args:
            logits: [n, vocab] per request the tip's row, then one row per draft token; may be changed in place.
            runs: what the rows belong to, one run per request.
            drafts: one per request.
            drawn: [n] the tokens that the pass drew, if it drew any; right for rows that need no shaping.

        Returns:
            Per request, the tokens to commit and the path of accepted nodes, root first.
        """
        ...


RULES: Mapping[str, Rule] = {
    "coupled": Coupled(),
    "rejection": Rejection(),
    "block": Block(),
    "k_sequential": KSequential(),
}
