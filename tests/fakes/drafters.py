"""Drafters that misbehave on purpose."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from engine.drafting.run_ahead.shared_pass import advance_together
from engine.protocols import NO_DRAFT, Draft, ProposeRow


class ConstantDrafter:
    """Always proposes the same token: always wrong where the target never draws it."""

    def __init__(self, token: int) -> None:
        self.token = token

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        return [Draft([self.token] * row.num_draft_tokens, list(range(-1, row.num_draft_tokens - 1))) for row in rows]

    def release(self, request_id: str) -> None:
        pass


class TreeDrafter:
    """Proposes random trees: siblings, and paths that are no prefix of the nodes."""

    def __init__(self, tokens: Sequence[int], seed: int = 0) -> None:
        self.tokens = list(tokens)
        self.random = random.Random(seed)

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        trees = ([self.random.randrange(-1, node) for node in range(row.num_draft_tokens)] for row in rows)
        return [Draft([self.random.choice(self.tokens) for _ in parents], parents) for parents in trees]

    def release(self, request_id: str) -> None:
        pass


class WrappedDrafter:
    """What the drafters below share: each does something to the proposals of another one, at random."""

    def __init__(self, drafter: Any, seed: int = 0) -> None:
        self.drafter = drafter
        self.random = random.Random(seed)

    def release(self, request_id: str) -> None:
        self.drafter.release(request_id)


class ForgetfulDrafter(WrappedDrafter):
    """Passes proposals on, but cuts some short, drops some, and forgets requests."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        for row in rows:
            if self.random.random() < 0.2:
                self.drafter.release(row.request.request_id)
        drafts = await self.drafter.propose(rows)
        lengths = [self.random.choice([0, 1, 2, 8]) for _ in drafts]
        return [Draft(d.token_ids[:n], d.parents[:n]) for d, n in zip(drafts, lengths, strict=True)]


def run_ahead(drafter: Any) -> bool:
    """Do as a draft worker between two proposals; return whether a pass was launched, or is under way."""
    if drafter.is_computing:
        return True
    drafter.settle()
    drafter.end_pass()
    num_forwards = drafter.stats.num_forwards
    advance_together([drafter], 10**6)
    return bool(drafter.stats.num_forwards > num_forwards)


class InterruptedDrafter(WrappedDrafter):
    """Lets a drafter run ahead for some passes after each proposal: none, a few, or as many as there are."""

    def __init__(self, drafter: Any, seed: int = 0, num_passes: Sequence[int] = (0, 1, 2, 3, 5, 1000)) -> None:
        super().__init__(drafter, seed)
        self.num_passes = num_passes

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        drafts = await self.drafter.propose(rows)
        for _ in range(self.random.choice(self.num_passes)):
            if not run_ahead(self.drafter):
                break
        return drafts


class CuttingDrafter(WrappedDrafter):
    """Cuts proposals to any length, with the rows they were sampled from."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        return [self._cut(draft) for draft in await self.drafter.propose(rows)]

    def _cut(self, draft: Draft) -> Draft:
        n = self.random.randrange(len(draft.token_ids) + 1)
        ids = None if draft.top_ids is None else draft.top_ids[:n]
        probs = None if draft.top_probs is None else draft.top_probs[:n]
        return Draft(draft.token_ids[:n], draft.parents[:n], ids, probs)


class LosableDrafter:
    """Has no drafts in every third round: its drafter has died and another begins with nothing, or answers too late."""

    def __init__(self, make: Callable[[], Any], loss: str) -> None:
        self.make, self.loss = make, loss
        self.drafter, self.num_rounds = make(), 0

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        self.num_rounds += 1
        is_lost = self.num_rounds % 3 == 0
        if is_lost and self.loss == "the draft dies":
            self.drafter = self.make()
            return [NO_DRAFT] * len(rows)
        drafts: list[Draft] = await self.drafter.propose(rows)
        return [NO_DRAFT] * len(rows) if is_lost and self.loss == "the draft hangs" else drafts

    def release(self, request_id: str) -> None:
        self.drafter.release(request_id)
