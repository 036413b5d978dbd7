"""Answers: the first one to each request, with which all others are compared, and which is audited."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.streams import Received
from tests.load.reference import BUNDLED, audit


@dataclass(slots=True)
class Answers:
    """The answers to requests whose texts are fixed, each a path and a body."""

    requests: Sequence[tuple[str, dict[str, Any]]]
    first: dict[int, Received] = field(default_factory=dict)
    audited: set[int] = field(default_factory=set)

    def difference(self, index: int, received: Received) -> str | None:
        """Return how an answer is not whole, or differs from the first one to its request; else None."""
        if received.error is not None or not received.has_ended:
            return f"ends with {received.error or 'no last event'} after {received.num_tokens} tokens"
        if received.usage["completion_tokens"] != received.num_tokens:
            return f"{received.num_tokens} tokens came, and usage is {received.usage}"
        return received.difference(self.first.setdefault(index, received))

    def audit(self) -> dict[int, str]:
        """Audit first answers that were not audited before; return how some are not the target's, by request."""
        new = {str(index): self.record(index) for index in self.first if index not in self.audited}
        self.audited |= self.first.keys()
        return {int(name): words for name, words in audit(BUNDLED, new).items()}

    def record(self, index: int) -> dict[str, Any]:
        """Return the record of a first answer, of what the client received."""
        path, body = self.requests[index]
        choices = [
            {"token_ids": choice.token_ids, "finish_reason": choice.reason}
            | ({} if body.get("echo") else {"text": choice.text, "logprobs": choice.logprobs or None})
            for _, choice in sorted(self.first[index].choices.items())
        ]
        return {"path": path, "body": body, "choices": choices}
