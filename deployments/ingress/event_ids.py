"""EventIds: the id of each event of a stream, from which any Ingress continues the stream, without stored events.

A text is a function of its request and its seed. So a client that lost its connection sends the request again with the
header `Last-Event-ID`; the text is computed again, and sent from the event after that one.
"""

import hashlib
import re
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Header

from deployments.openai.writer import Reply, Writer
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.protocols import RequestOutput, RoundTrace

HEADER = "Last-Event-ID"
LastEventId = Annotated[str | None, Header()]
"""The id of the last event that a client received of a stream."""
_ID = re.compile(
    r"(?P<reply>[a-z]+[-_][0-9a-f]{32}):(?P<created>\d{1,12}):(?P<seed>\d{1,19}):(?P<digest>[0-9a-f]{12})"
    r":(?P<events>\d{1,9}):(?P<stage>[ocs])(?P<done>\d{1,9}):(?P<sent>[\d.f,]{3,8192})"
    r"(\+(?P<choice>\d{1,3})=(?P<until>[\d.f]+))?"
)
_SENT = re.compile(r"(\d{1,9})\.(\d{1,9})(f?)")


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of a choice was sent: tokens, characters, and whether its end was."""

    num_tokens: int = 0
    num_chars: int = 0
    is_finished: bool = False

    def plus(self, rounds: Sequence[RequestOutput]) -> "Sent":
        """Return what is sent after further rounds."""
        num_tokens = self.num_tokens + sum(len(output.token_ids) for output in rounds)
        num_chars = self.num_chars + sum(len(output.text) for output in rounds)
        has_end = any(output.finish_reason is not None for output in rounds)
        return Sent(num_tokens, num_chars, self.is_finished or has_end)

    def reaches(self, goal: "Sent") -> bool:
        """Return whether this is at least as much."""
        return self.num_tokens >= goal.num_tokens and self.is_finished >= goal.is_finished

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_chars}{'f' if self.is_finished else ''}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What an answer must have in common with the one that it continues."""

    reply_id: str
    created: int
    seed: int
    digest: str

    def __str__(self) -> str:
        return f"{self.reply_id}:{self.created}:{self.seed}:{self.digest}"


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The place of an event in its stream.

    Attributes:
        stage: o, it is one of those that begin the stream; c, that end it; s, of those between.
        sent: what was sent of each choice before the group of events that it belongs to.
        choice: the choice that the group brings to `until`, if it is of one.
        num_done: the events of this group up to this one.
    """

    stage: str
    sent: tuple[Sent, ...]
    choice: int | None = None
    until: Sent = Sent()
    num_done: int = 0

    def __str__(self) -> str:
        group = "" if self.choice is None else f"+{self.choice}={self.until}"
        return f"{self.stage}{self.num_done}:{','.join(map(str, self.sent))}{group}"


def read_id(text: str, num_choices: int) -> tuple[Answered, int, LastEvent]:
    """Return what an event's id says: the answer, the events sent up to it, and its place among them.

    Raises RequestError if no stream of so many choices has such an event.
    """
    match = _ID.fullmatch(text)
    sent = [_SENT.fullmatch(part) for part in match["sent"].split(",")] if match else []
    until = _SENT.fullmatch(match["until"] or "0.0") if match else None
    choice = int(match["choice"]) if match and match["choice"] else None
    if match is None or None in sent or until is None or len(sent) != num_choices or (choice or 0) >= num_choices:
        raise RequestError(f"{HEADER} is {text[:80]!r}, which is no id of an event of such a stream", HEADER)
    place = LastEvent(match["stage"], tuple(map(_sent, filter(None, sent))), choice, _sent(until), int(match["done"]))
    answered = Answered(match["reply"], int(match["created"]), int(match["seed"]), match["digest"])
    return answered, int(match["events"]), place


def _sent(match: re.Match[str]) -> Sent:
    return Sent(int(match[1]), int(match[2]), bool(match[3]))


class EventIds:
    """Gives the events of one stream their ids, and leaves out those that an earlier connection has sent.

    Attributes:
        num_events: events sent so far, on earlier connections, too.
    """

    def __init__(
        self, answered: Answered | None, num_choices: int, *, num_events: int = 0, last: LastEvent | None = None
    ) -> None:
        """Begin a stream, or continue it after `num_events` events; without `answered`, events get no ids."""
        self._answered, self._last = answered, last
        self._sent = [Sent()] * num_choices
        self._held: list[list[RequestOutput]] = [[] for _ in range(num_choices)]
        self._is_behind = [last is not None] * num_choices
        self.num_events = num_events - (0 if last is None else last.num_done)

    def opening(self, events: str) -> str:
        """Return what is left to send of the events before the first tokens."""
        if self._last is not None and self._last.stage != "o":
            return ""
        return self._stage("o", events)

    def closing(self, events: str) -> str:
        """Return what is left to send of the events after the last tokens."""
        return self._stage("c", events)

    def pieces(self, choice: int, rounds: list[RequestOutput]) -> list[list[RequestOutput]]:
        """Return the rounds to write, cut where the last event was; none while that has not been reached."""
        last = self._last
        if last is None or not self._is_behind[choice]:
            return [rounds]
        held = self._held[choice]
        held += rounds
        sent = last.sent[choice]
        until = last.until if last.choice == choice else sent
        if not Sent().plus(held).reaches(until):
            return []
        self._is_behind[choice] = False
        piece, rest = _split(held, until)
        head, piece = _split(piece, sent)
        return [part for part in (head, piece, rest) if part]

    def piece(self, choice: int, rounds: list[RequestOutput], events: str) -> str:
        """Return what is left to send of the events of a piece."""
        last, before = self._last, tuple(self._sent)
        after = self._sent[choice] = before[choice].plus(rounds)
        num_done = 0
        if last is not None:
            if last.sent[choice].reaches(after):
                return ""
            num_done = last.num_done if last.choice == choice and after == last.until else 0
        return self._label(events, num_done, LastEvent("s", before, choice, after), LastEvent("s", tuple(self._sent)))

    def _stage(self, stage: str, events: str) -> str:
        num_done = self._last.num_done if self._last is not None and self._last.stage == stage else 0
        return self._label(events, num_done, LastEvent(stage, tuple(self._sent)))

    def _label(self, text: str, num_done: int, place: LastEvent, end: LastEvent | None = None) -> str:
        """Return the events after the first `num_done`, with ids at `place`; that of the last one is at `end`."""
        if self._answered is None:
            return text
        events, labelled = text.split("\n\n")[:-1], []
        for number, event in enumerate(events, 1):
            self.num_events += 1
            if number <= num_done:
                continue
            here = replace(place, num_done=number) if end is None or number < len(events) else end
            labelled.append(f"{event}\nid: {self._answered}:{self.num_events}:{here}\n\n")
        return "".join(labelled)


def event_ids(
    writer: Writer, params: SamplingParams, last_event_id: str | None, *, is_seeded: bool
) -> tuple[EventIds, int]:
    """Return the ids of an answer's events and the seed to draw, and make the answer the one that is continued.

    Args:
        is_seeded: target, request and seed determine the text; without that, events have no ids.

    Raises:
        RequestError: the stream cannot be continued after `last_event_id`.
    """
    reply, num_choices = writer.reply, len(writer.choices)
    answered = Answered(reply.id, reply.created, secrets.randbits(63), _digest(reply, params))
    if last_event_id is None:
        return EventIds(answered if is_seeded and writer.request.stream else None, num_choices), answered.seed
    if not writer.request.stream:
        raise RequestError(f"{HEADER} is only allowed with stream", HEADER)
    if not is_seeded:
        raise RequestError(f"{HEADER} needs the coupled rule: with this server's, a repeated text differs", HEADER)
    continued, num_events, place = read_id(last_event_id, num_choices)
    if continued.digest != answered.digest:
        raise RequestError(f"{HEADER} is of another request, or of a server that writes other texts", HEADER)
    writer.reply = replace(reply, id=continued.reply_id, created=continued.created)
    return EventIds(continued, num_choices, num_events=num_events, last=place), continued.seed


def _digest(reply: Reply, params: SamplingParams) -> str:
    """Return a digest of all that determines an answer but a seed that the server chose."""
    digest = hashlib.blake2s(repr((reply.fingerprint, params)).encode(), digest_size=6)
    for prompt in reply.prompts:
        digest.update(array("q", [len(prompt), *prompt]).tobytes())
    return digest.hexdigest()


def _split(rounds: list[RequestOutput], end: Sent) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return the rounds up to `end`, and those after it; a round that reaches beyond is cut."""
    sent = Sent()
    for i, output in enumerate(rounds):
        after = sent.plus([output])
        if not end.reaches(after):
            first, second = _cut(output, end.num_tokens - sent.num_tokens, end.num_chars - sent.num_chars)
            return [*rounds[:i], *([first] if first.token_ids else [])], [second, *rounds[i + 1 :]]
        sent = after
    return rounds, []


def _cut(output: RequestOutput, num_tokens: int, num_chars: int) -> tuple[RequestOutput, RequestOutput]:
    """Return a round as two; the second has its figures, its end and what is left of its draft."""
    num_accepted = max(0, output.num_accepted_tokens - num_tokens)
    first_trace = second_trace = output.trace
    if output.trace is not None:
        texts, draft = output.trace.texts, output.trace.draft_token_ids[output.num_accepted_tokens - num_accepted :]
        first_trace = RoundTrace(texts[:num_tokens], 0, [], [])
        second_trace = RoundTrace(texts[num_tokens:], num_accepted, draft, list(range(-1, len(draft) - 1)))
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
        num_accepted_tokens=num_accepted,
        trace=second_trace,
    )
    return first, second
