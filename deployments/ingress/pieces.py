"""The rounds of one choice: measured, joined for an event, and cut where the client's last event ended."""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.requests.output import RequestOutput, RoundTrace


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of a choice was sent; the checksum is of its tokens."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    is_finished: bool = False

    def plus(self, rounds: Sequence[RequestOutput]) -> "Sent":
        token_ids = [token_id for output in rounds for token_id in output.token_ids]
        num_chars = self.num_chars + sum(len(output.text) for output in rounds)
        checksum = zlib.crc32(array("q", token_ids), self.checksum)
        has_end = any(output.finish_reason is not None for output in rounds)
        return Sent(self.num_tokens + len(token_ids), num_chars, checksum, self.is_finished or has_end)

    def reaches(self, goal: "Sent") -> bool:
        return self.num_tokens >= goal.num_tokens and self.is_finished >= goal.is_finished

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_chars}.{self.checksum}{'f' if self.is_finished else ''}"


def join(rounds: list[RequestOutput]) -> RequestOutput:
    """Return one round in place of several."""
    first, last = rounds[0], rounds[-1]
    if first is last:
        return first
    logprobs = None if first.logprobs is None else [entry for output in rounds for entry in output.logprobs or []]
    return replace(
        last,
        token_ids=[token for output in rounds for token in output.token_ids],
        text="".join(output.text for output in rounds),
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


def split(rounds: list[RequestOutput], end: Sent) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return the rounds up to `end`, and the rounds after it; cut a round that reaches beyond."""
    sent = Sent()
    for i, output in enumerate(rounds):
        after = sent.plus([output])
        if not end.reaches(after):
            first, second = _cut(output, end.num_tokens - sent.num_tokens, end.num_chars - sent.num_chars)
            return [*rounds[:i], *([first] if first.token_ids else [])], [second, *rounds[i + 1 :]]
        sent = after
    return rounds, []


def _cut(output: RequestOutput, num_tokens: int, num_chars: int) -> tuple[RequestOutput, RequestOutput]:
    """Return a round as two; the second has its figures, its end and the remaining draft."""
    first_trace = second_trace = output.trace
    if output.trace is not None:
        first_trace = RoundTrace(output.trace.texts[:num_tokens], [], [], [])
        second_trace = rest_of(output.trace, num_tokens)
    logprobs = output.logprobs
    first = replace(
        output,
        token_ids=output.token_ids[:num_tokens],
        text=output.text[:num_chars],
        logprobs=logprobs and logprobs[:num_tokens],
        finish_reason=None,
        stop_reason=None,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_predicted_tokens=0,
        trace=first_trace,
    )
    second = replace(
        output,
        token_ids=output.token_ids[num_tokens:],
        text=output.text[num_chars:],
        logprobs=logprobs and logprobs[num_tokens:],
        prompt_logprobs=output.prompt_logprobs if num_tokens == 0 else None,
        num_accepted_tokens=max(0, output.num_accepted_tokens - num_tokens),
        trace=second_trace,
    )
    return first, second


def rest_of(trace: RoundTrace, num_tokens: int) -> RoundTrace:
    """Return a round without its first tokens; of the draft, the nodes below the last removed token remain."""
    texts, path = trace.texts[num_tokens:], trace.path
    if num_tokens > len(path):
        return RoundTrace(texts, [], [], [])
    places = {path[num_tokens - 1] if num_tokens else -1: -1}
    for node, parent in enumerate(trace.parents):
        if parent in places:
            places[node] = len(places) - 1
    nodes = list(places)[1:]
    draft = [trace.draft_token_ids[node] for node in nodes]
    return RoundTrace(
        texts, [places[node] for node in path[num_tokens:]], draft, [places[trace.parents[node]] for node in nodes]
    )
