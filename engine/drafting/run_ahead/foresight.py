"""Foresight: chooses the verdicts to draft for, and learns from the verdicts that arrive."""

import itertools
import math
from collections.abc import Collection, Sequence

from engine.drafting.chain import RankedRow, Ranking, joined
from engine.drafting.run_ahead.branches import Trunk
from engine.drafting.run_ahead.verdicts import AcceptedLengths, Confidence, Options, likeliest
from engine.protocols import Request

NUM_CANDIDATES = 10


class Foresight:
    """Predicts verdicts from the draft's scores; where the rule shares no noise, also from recent accepted lengths.

    Attributes:
        accepted: how many draft tokens recent verdicts accepted.
    """

    def __init__(self, num_draft_tokens: int, *, shares_noise: bool) -> None:
        """Start without observations; `shares_noise` is the rule's: the target draws with the noise in the scores."""
        self.accepted = AcceptedLengths(num_draft_tokens)
        self._shares_noise = shares_noise
        # Greedy requests are learned apart: noise lets unlikely tokens win, where draft and target differ more.
        self._confidence = {is_greedy: Confidence() for is_greedy in (False, True)}

    def learn(self, trunk: Trunk, accepted: int, token: int) -> None:
        """Learn from the verdict on a trunk's draft: `accepted` tokens, then `token`."""
        drafted = trunk.chain.token_ids
        if drafted:
            self.accepted.observe(accepted, len(drafted))
        confidence = self._confidence_in(trunk.request)
        # Without shared noise, the scores predict only the token after the last accepted one.
        first = 0 if self._shares_noise else accepted
        committed = [*drafted[first:accepted], token]
        for options, committed_token in zip(trunk.outlook[first : accepted + 1], committed, strict=False):
            if options.token_ids:
                confidence.observe(options.scores, options.index(committed_token))

    def look(self, trunks: Sequence[Trunk], tips: Ranking) -> None:
        """Set the outlook of some trunks; `tips` rank the tokens after each trunk's last draft token."""
        rows = [row for i, trunk in enumerate(trunks) for row in (*trunk.chain.rankings, RankedRow(tips, i))]
        scores, ids = (tensor.tolist() for tensor in joined(rows).top(NUM_CANDIDATES))
        counts = [row.index(-math.inf) if -math.inf in row else len(row) for row in scores]
        outlook = (Options(tokens[:n], row[:n]) for tokens, row, n in zip(ids, scores, counts, strict=True))
        for trunk in trunks:
            trunk.outlook = list(itertools.islice(outlook, len(trunk.chain.token_ids) + 1))
            trunk.chain.rankings.clear()

    def choose_roots(self, trunk: Trunk, width: int, end_ids: Collection[int]) -> None:
        """Choose the verdicts to draft for, at most `width`; none after which the text ends."""
        drafted = trunk.chain.token_ids
        lengths = None if self._shares_noise else self.accepted.probabilities(len(drafted))
        verdicts = likeliest(trunk.outlook, drafted, self._confidence_in(trunk.request), lengths)
        trunk.roots = [verdict for verdict in verdicts if verdict[1] not in end_ids][:width]

    def _confidence_in(self, request: Request) -> Confidence:
        return self._confidence[request.params.temperature == 0]
