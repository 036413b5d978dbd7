"""EventIds: the ids of a stream's events, from which any Ingress continues the stream, without stored events.

Target, request and seed determine a text. A client that lost its connection repeats its request with the header
`Last-Event-ID`; the text is computed again, and sent from the next event on.
"""

import hashlib
import re
import secrets
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Header

from deployments.ingress.pieces import Sent, join, split
from deployments.openai.writer import Reply, Writer
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.requests.output import RequestOutput

HEADER = "Last-Event-ID"
LastEventId = Annotated[str | None, Header()]
MAX_CHOICES = 32  # of a stream whose events have ids, because an id grows with the choices
DIFFERS = "the text that was computed again differs from the one sent before; send the request without " + HEADER
_AMOUNT = r"\d{1,9}\.\d{1,9}\.\d{1,10}f?"
_ID = re.compile(
    r"([a-z]+[-_][0-9a-f]{32}):(\d{1,12}):(\d{1,19}):([0-9a-f]{12}):(\d{1,9}):([ocs])(\d{1,9})"
    rf":({_AMOUNT}(?:,{_AMOUNT})*)(?:\+(\d{{1,3}})=({_AMOUNT}))?"
)


@dataclass(frozen=True, slots=True)
class EventId:
    """An event's place in its stream, and what a continued answer keeps.

    A group is the events of one `piece`. In the stages o and c, and at a group's end, `group` is None.
    """

    reply_id: str
    created: int
    seed: int
    digest: str
    num_events: int = 0  # up to this event
    stage: str = "o"  # o: the event opens the stream; c: it closes the stream; s: it is between
    num_done: int = 0  # events of its group up to this event
    sent: tuple[Sent, ...] = ()  # of each choice, before the group
    group: tuple[int, Sent] | None = None  # a choice, and what is sent of it after the group

    def __str__(self) -> str:
        answer = f"{self.reply_id}:{self.created}:{self.seed}:{self.digest}"
        group = f"+{self.group[0]}={self.group[1]}" if self.group else ""
        return f"{answer}:{self.num_events}:{self.stage}{self.num_done}:{','.join(map(str, self.sent))}{group}"


def read_id(text: str, num_choices: int) -> EventId:
    """Return an event's id from its text; raise RequestError if a stream of so many choices has no such event."""
    if match := _ID.fullmatch(text):
        reply_id, created, seed, digest, num_events, stage, num_done, amounts, choice, until = match.groups()
        sent = tuple(map(_sent, amounts.split(",")))
        group = (int(choice), _sent(until)) if choice else None
        if len(sent) == num_choices and (group is None or group[0] < num_choices):
            return EventId(
                reply_id, int(created), int(seed), digest, int(num_events), stage, int(num_done), sent, group
            )
    raise RequestError(f"{HEADER} is {text[:80]!r}, which is no id of an event of such a stream", HEADER)


def _sent(text: str) -> Sent:
    num_tokens, num_chars, checksum = map(int, text.removesuffix("f").split("."))
    return Sent(num_tokens, num_chars, checksum, text.endswith("f"))


class EventIds:
    """Gives the events of one stream their ids, and omits events that an earlier connection has sent."""

    def __init__(self, writer: Writer, event_id: EventId | None, *, is_continued: bool = False) -> None:
        """Begin a stream, or continue it after the event with this id; without an id, its events have no ids."""
        self._writer = writer
        self._id, self._last = event_id, event_id if is_continued else None
        self._sent = [Sent()] * len(writer.choices)
        self._goals = list(self._last.sent) if self._last else []
        """What must be computed again of each choice before anything is sent; empty after that."""
        if self._last and self._last.group:
            self._goals[self._last.group[0]] = self._last.group[1]
        self._held: list[list[RequestOutput]] = [[] for _ in self._goals]
        self._reached = [Sent() for _ in self._goals]
        self._num_events = self._last.num_events - self._last.num_done if self._last else 0

    def opening(self) -> str:
        events = self._writer.opening()
        if self._last is not None and self._last.stage != "o":
            return ""
        return self._label(events, "o", tuple(self._sent))

    def closing(self) -> str:
        """Return the unsent events after the last tokens; raise RequestError if the text is shorter than before."""
        events = self._write(self._writer.closing)
        if self._goals:
            raise RequestError(DIFFERS, HEADER)
        return self._label(events, "c", tuple(self._sent))

    def failed(self, body: dict[str, Any]) -> str:
        return self._write(lambda: self._writer.failed(body))

    def pieces(self, by_choice: Mapping[int, list[RequestOutput]]) -> list[tuple[int, list[RequestOutput]]]:
        """Return the rounds to write, none before every goal is reached; raise RequestError if a text differs."""
        last, goals = self._last, self._goals
        if last is None or not goals:
            return list(by_choice.items())
        for choice, rounds in by_choice.items():
            self._held[choice] += rounds
            self._reached[choice] = self._reached[choice].plus(rounds)
        if not all(reached.reaches(goal) for reached, goal in zip(self._reached, goals, strict=True)):
            return []
        self._goals = []
        pieces: list[list[tuple[int, list[RequestOutput]]]] = [[], [], []]  # before the group, of it, after it
        for choice, (held, goal, sent) in enumerate(zip(self._held, goals, last.sent, strict=True)):
            repeated, after = split(held, goal)
            before, group = split(repeated, sent)
            if Sent().plus(before) != sent or sent.plus(group) != goal:
                raise RequestError(DIFFERS, HEADER)
            for piece, rounds in zip(pieces, (before, group, after), strict=True):
                piece += [(choice, rounds)] if rounds else []
        self._held.clear()
        return [*pieces[0], *pieces[1], *pieces[2]]

    def piece(self, choice: int, rounds: list[RequestOutput]) -> str:
        """Add rounds to their choice, and return their unsent events; the rounds are joined."""
        writing = self._writer.choices[choice]
        for output in rounds:
            writing.append(output)
        events = self._write(lambda: self._writer.chunk(writing, join(rounds)))
        last, before = self._last, tuple(self._sent)
        after = self._sent[choice] = before[choice].plus(rounds)
        if last is not None and last.sent[choice].reaches(after):
            return ""
        return self._label(events, "s", before, (choice, after))

    def _write(self, write: Callable[[], str]) -> str:
        self._writer.num_events = self._num_events
        return write()

    def _label(self, text: str, stage: str, sent: tuple[Sent, ...], group: tuple[int, Sent] | None = None) -> str:
        """Return a group's unsent events with ids; `sent` is what was sent before the group."""
        if self._id is None:
            self._num_events += text.count("\n\n")
            return text
        last = self._last
        num_done = last.num_done if last and (last.stage, last.group) == (stage, group) else 0
        events, labelled = text.split("\n\n")[:-1], []
        for number, event in enumerate(events, 1):
            self._num_events += 1
            if number <= num_done:
                continue
            place = replace(self._id, num_events=self._num_events, stage=stage, num_done=number, sent=sent, group=group)
            if group and number == len(events):
                place = replace(place, num_done=0, sent=tuple(self._sent), group=None)
            labelled.append(f"{event}\nid: {place}\n\n")
        return "".join(labelled)


def event_ids(
    writer: Writer, params: SamplingParams, last_event_id: str | None, *, is_seeded: bool
) -> tuple[EventIds, int]:
    """Return an answer's event ids and the seed to draw with; `last_event_id` makes it continue an earlier answer.

    Events have ids if target, request and seed determine the text. Raises RequestError if it cannot be continued.
    """
    reply, num_choices, seed = writer.reply, len(writer.choices), secrets.randbits(63)
    has_ids = is_seeded and writer.request.stream and num_choices <= MAX_CHOICES
    if last_event_id is None and not has_ids:
        return EventIds(writer, None), seed
    answer = EventId(reply.id, reply.created, seed, _digest(reply, params))
    if last_event_id is None:
        return EventIds(writer, answer), seed
    if not writer.request.stream:
        raise RequestError(f"{HEADER} is only allowed with stream", HEADER)
    if not is_seeded:
        raise RequestError(f"{HEADER} needs the coupled rule: with this server's, a repeated text differs", HEADER)
    last = read_id(last_event_id, num_choices)
    if last.digest != answer.digest:
        raise RequestError(f"{HEADER} is of another request, or of a server that writes other texts", HEADER)
    writer.reply = replace(reply, id=last.reply_id, created=last.created)
    return EventIds(writer, last, is_continued=True), last.seed


def _digest(reply: Reply, params: SamplingParams) -> str:
    """Return a digest of what determines an answer, without a seed that the server chose."""
    digest = hashlib.blake2s(repr((reply.fingerprint, params)).encode(), digest_size=6)
    for prompt in reply.prompts:
        digest.update(array("q", [len(prompt), *prompt]).tobytes())
    return digest.hexdigest()
