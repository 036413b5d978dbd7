"""Audit: is a finished answer what the target writes?

Noise depends on seed, position and token alone, so every token of an answer is the argmax of shaped logits plus noise
at its place. An answer is verified like one long draft, by the scheduler, rule and passes that serve; where the target
writes another token, the answer's token is committed all the same, so that all its differences are found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.params import SamplingParams
from engine.protocols import Difference
from engine.requests.output import FinishReason, RequestOutput

_SAME_LOGPROB = 1e-3
"""How far log probabilities may differ by their rounding, which depends on the batch."""


@dataclass(frozen=True, slots=True)
class Record:
    """A finished text, and all that determines it but the target.

    None is what is not known, and not compared. `params` has the text's own seed, and n=1.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    text: str | None = None
    logprobs: Sequence[float] | None = None


@dataclass(slots=True)
class Finding:
    """What an audit found.

    Attributes:
        differences: where the target would have written another token.
        problems: other differences, in words.
        logprobs_apart: the largest difference of a log probability.
    """

    num_tokens: int
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    logprobs_apart: float = 0.0

    def is_equal(self, near: float = 0.0) -> bool:
        """Return whether nothing differs but tokens whose scores are at most `near` apart."""
        margin = max((difference.margin for difference in self.differences), default=-math.inf)
        return not self.problems and margin <= near and self.logprobs_apart <= max(near, _SAME_LOGPROB)


class Audit:
    """Compares a record with the outputs of the request that audits it: its own tokens, up to the target's end."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._outputs: list[RequestOutput] = []
        self._num_tokens = 0

    def append(self, output: RequestOutput) -> bool:
        """Add the next output, and return whether the audit is done; the request may still run."""
        self._outputs.append(output)
        self._num_tokens += len(output.token_ids)
        return output.finish_reason is not None or self._num_tokens > len(self.record.token_ids)

    def finding(self) -> Finding:
        record, outputs, last = self.record, self._outputs, self._outputs[-1]
        expected, actual = len(record.token_ids), self._num_tokens
        finding = Finding(expected, self._differences())
        if actual < expected:
            reason = f"{last.finish_reason}, {last.stop_reason}" if last.stop_reason else last.finish_reason
            finding.problems.append(f"the target ends the text after token {actual} of {expected} ({reason})")
        elif record.finish_reason is None:
            pass  # the text was cut off
        elif actual > expected:
            finding.problems.append(f"the target continues after the last token, {expected}, with {last.token_ids[-1]}")
        elif record.finish_reason != last.finish_reason:
            finding.problems.append(f"finish_reason is {record.finish_reason}, the target's is {last.finish_reason}")
        elif record.text not in (None, "".join(output.text for output in outputs)):
            finding.problems.append("the text is not the text of its tokens")
        if record.logprobs is not None:
            logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()][:expected]
            if len(logprobs) != len(record.logprobs):
                finding.problems.append(f"there are {len(record.logprobs)} log probabilities of {len(logprobs)} tokens")
            finding.logprobs_apart = max(map(_apart, record.logprobs, logprobs), default=0.0)
        return finding

    def _differences(self) -> list[Difference]:
        """Return all differences; where a token violates a grammar, it is the last, because nothing may follow it."""
        found = [difference for output in self._outputs for difference in output.differences]
        if self.record.params.grammar is not None:
            ends = [nth for nth, difference in enumerate(found, 1) if difference.margin == math.inf]
            found = found[: ends[0]] if ends else found
        return found


def _apart(one: float, other: float) -> float:
    return 0.0 if one == other else abs(one - other)  # both may be -inf
