"""A drafter of your own: it drafts what followed the last token in all texts so far, most often.

`serve run deployments:app drafting=tests.examples.drafter:BigramDrafter`, or `LLM(drafting="...")`; `check_drafter`
tries it on a target whose law is known.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from engine import check_drafter
from engine.config import EngineConfig
from engine.protocols import Draft, ProposeRow, chain


class BigramDrafter:
    """Counts pairs of tokens; a drafter named by its import path runs in the Router, and is made of the settings."""

    def __init__(self, config: EngineConfig) -> None:
        self._followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._num_read: Counter[str] = Counter()

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row; one that is empty is plain decoding."""
        for row in rows:
            tokens, start = row.request.token_ids, self._num_read[row.request.request_id]
            for token, follower in zip(tokens[start:], tokens[start + 1 :], strict=False):
                self._followers[token][follower] += 1
            self._num_read[row.request.request_id] = len(tokens) - 1
        return [chain(self._continue(row.request.token_ids[-1], row.num_draft_tokens)) for row in rows]

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._num_read.pop(request_id, None)

    def _continue(self, token: int, length: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < length and (followers := self._followers.get(token)):
            token = followers.most_common(1)[0][0]
            drafted.append(token)
        return drafted


if __name__ == "__main__":
    # Only coupled: this drafter learns from other requests' texts, which the other rules make depend on their drafts.
    check_drafter(BigramDrafter, rules=["coupled"])
