"""SeveralDrafters: drafts each row with the draft model that it names."""

from collections.abc import Sequence

from engine.protocols import NO_DRAFT, Draft, Drafter, ProposeRow


class SeveralDrafters:
    """The drafters of several models in this process."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        for index, drafter in enumerate(self._drafters):
            places = [place for place, row in enumerate(rows) if row.draft_index == index]
            # Even without rows: what a drafter prepared for its last rows is of no use any more.
            for place, draft in zip(places, await drafter.propose([rows[place] for place in places]), strict=True):
                drafts[place] = draft
        return drafts

    def release(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.release(request_id)
