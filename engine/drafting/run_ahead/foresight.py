"""Foresight: which verdicts on a draft to prepare for, and what the verdicts that came teach about the next."""

import itertools
import math
from collections.abc import Collection, Sequence

from engine.drafting.chain import Ranking
from engine.drafting.run_ahead.branches import Trunk
from engine.drafting.run_ahead.verdicts import AcceptedLengths, Confidence, Options, likeliest
from engine.protocols import Request

NUM_CANDIDATES = 10


class Foresight:
    """Foretells verdicts from the draft's own scores, and under the rejection rule from those that came lately.

    Attributes:
        accepted: how many draft tokens were accepted lately.
    """

    def __init__(self, num_draft_tokens: int, *, shares_noise: bool) -> None:
        """Know nothing yet; `shares_noise` says whether the target draws with the noise that the scores contain."""
        self.accepted = AcceptedLengths(num_draft_tokens)
        self._shares_noise = shares_noise
        # What separates draft and target weighs more where noise makes unlikely tokens win.
        self._confidence = {is_greedy: Confidence() for is_greedy in (False, True)}

    def learn(self, trunk: Trunk, accepted: int, token: int) -> None:
        """Take what came of a trunk's draft."""
        drafted = trunk.chain.token_ids
        if drafted:
            self.accepted.observe(accepted, len(drafted))
        confidence = self._confidence_in(trunk.request)
        # Without shared noise the scores speak only of what follows a rejection.
        first = 0 if self._shares_noise else accepted
        taken = [*drafted[first:accepted], token]
        for options, chosen in zip(trunk.outlook[first : accepted + 1], taken, strict=False):
            if options.token_ids:
                confidence.observe(options.scores, options.index(chosen))

    def look(self, trunks: Sequence[Trunk], tips: Ranking) -> None:
        """Note what may come at every position of some trunks; `tips` rank what follows their last tokens."""
        rankings = [own for i, trunk in enumerate(trunks) for own in (*trunk.chain.rankings, tips.row(i))]
        scores, ids = (part.tolist() for part in Ranking.joined(rankings).top(NUM_CANDIDATES))
        counts = [own.index(-math.inf) if -math.inf in own else len(own) for own in scores]
        outlook = (Options(own[:n], score[:n]) for own, score, n in zip(ids, scores, counts, strict=True))
        for trunk in trunks:
            trunk.outlook = list(itertools.islice(outlook, len(trunk.chain.token_ids) + 1))
            trunk.chain.rankings.clear()

    def bet(self, trunk: Trunk, width: int, end_ids: Collection[int]) -> None:
        """Choose the verdicts to draft for; nothing is drafted after the tokens that end the text."""
        drafted = trunk.chain.token_ids
        lengths = None if self._shares_noise else self.accepted.probabilities(len(drafted))
        verdicts = likeliest(trunk.outlook, drafted, self._confidence_in(trunk.request), lengths)
        trunk.roots = [verdict for verdict in verdicts if verdict[1] not in end_ids][:width]

    def _confidence_in(self, request: Request) -> Confidence:
        return self._confidence[request.params.temperature == 0]
