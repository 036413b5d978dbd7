"""EventIds: the id of each event of a stream, from which any Ingress continues the stream, without stored events.

A text is a function of its request and its seed. So a client that lost its connection sends the request again with the
header `Last-Event-ID`; the text is computed again, and sent from the event after that one.
"""

import hashlib
import re
import secrets
import zlib
from array import array
from collections.abc import Mapping, Sequence
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
MAX_CHOICES = 32
"""Events of streams of more choices have no ids, which would grow with them."""
DIFFERS = "the text that was computed again differs from the one sent before; send the request without " + HEADER
_AMOUNT = r"\d{1,9}\.\d{1,9}\.\d{1,10}f?"
_ID = re.compile(
    r"([a-z]+[-_][0-9a-f]{32}):(\d{1,12}):(\d{1,19}):([0-9a-f]{12}):(\d{1,9}):([ocs])(\d{1,9})"
    rf":({_AMOUNT}(?:,{_AMOUNT})*)(?:\+(\d{{1,3}})=({_AMOUNT}))?"
)


@dataclass(frozen=True, slots=True)
class Sent:
    """How much of a choice was sent: tokens, characters, a checksum of the tokens, and whether its end was."""

    num_tokens: int = 0
    num_chars: int = 0
    checksum: int = 0
    is_finished: bool = False

    def plus(self, rounds: Sequence[RequestOutput]) -> "Sent":
        """Return what is sent after further rounds."""
        token_ids = [token_id for output in rounds for token_id in output.token_ids]
        num_chars = self.num_chars + sum(len(output.text) for output in rounds)
        checksum = zlib.crc32(array("q", token_ids), self.checksum)
        has_end = any(output.finish_reason is not None for output in rounds)
        return Sent(self.num_tokens + len(token_ids), num_chars, checksum, self.is_finished or has_end)

    def reaches(self, goal: "Sent") -> bool:
        """Return whether this is at least as much."""
        return self.num_tokens >= goal.num_tokens and self.is_finished >= goal.is_finished

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_chars}.{self.checksum}{'f' if self.is_finished else ''}"


@dataclass(frozen=True, slots=True)
class EventId:
    """The id of an event: the facts that a continued answer keeps, and the event's place in the stream.

    Attributes:
        num_events: the events up to this one, 0 before the first.
        stage: o, it is one of those that begin the stream; c, that end it; s, of those between.
        num_done: the events of its group up to this one.
        sent: what was sent of each choice before its group.
        group: a choice, and what is sent of it after the group; None after the group, and where it is of all choices.
    """

    reply_id: str
    created: int
    seed: int
    digest: str
    num_events: int = 0
    stage: str = "o"
    num_done: int = 0
    sent: tuple[Sent, ...] = ()
    group: tuple[int, Sent] | None = None

    def __str__(self) -> str:
        answer = f"{self.reply_id}:{self.created}:{self.seed}:{self.digest}"
        group = f"+{self.group[0]}={self.group[1]}" if self.group else ""
        return f"{answer}:{self.num_events}:{self.stage}{self.num_done}:{','.join(map(str, self.sent))}{group}"


def read_id(text: str, num_choices: int) -> EventId:
    """Return an event's id; raise RequestError if no stream of so many choices has such an event."""
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
    """Gives the events of one stream their ids, and leaves out those that an earlier connection has sent."""

    def __init__(self, event_id: EventId | None, num_choices: int, *, is_continued: bool = False) -> None:
        """Begin a stream, or continue it after the event with this id; without an id, events get none."""
        self._id, self._last = event_id, event_id if is_continued else None
        self._sent = [Sent()] * num_choices
        self._goals = list(self._last.sent) if self._last else []
        """What each choice must reach again before anything is sent; empty once all have."""
        if self._last and self._last.group:
            self._goals[self._last.group[0]] = self._last.group[1]
        self._held: list[list[RequestOutput]] = [[] for _ in self._goals]
        self._reached = [Sent() for _ in self._goals]
        self.num_events = self._last.num_events - self._last.num_done if self._last else 0

    def opening(self, events: str) -> str:
        """Return what is left to send of the events before the first tokens."""
        if self._last is not None and self._last.stage != "o":
            return ""
        return self._label(events, "o", tuple(self._sent))

    def closing(self, events: str) -> str:
        """Return what is left to send of the events after the last tokens; raise RequestError as `pieces` does."""
        if self._goals:
            raise RequestError(DIFFERS, HEADER)
        return self._label(events, "c", tuple(self._sent))

    def pieces(self, by_choice: Mapping[int, list[RequestOutput]]) -> list[tuple[int, list[RequestOutput]]]:
        """Return the choices' rounds to write, none until all are there again; raise RequestError if a text differs."""
        last, goals = self._last, self._goals
        if last is None or not goals:
            return list(by_choice.items())
        for choice, rounds in by_choice.items():
            self._held[choice] += rounds
            self._reached[choice] = self._reached[choice].plus(rounds)
        if not all(reached.reaches(goal) for reached, goal in zip(self._reached, goals, strict=True)):
            return []
        self._goals = []
        parts: list[list[tuple[int, list[RequestOutput]]]] = [[], [], []]
        for choice, (held, goal, sent) in enumerate(zip(self._held, goals, last.sent, strict=True)):
            piece, rest = _split(held, goal)
            head, piece = _split(piece, sent)
            if Sent().plus(head) != sent or sent.plus(piece) != goal:
                raise RequestError(DIFFERS, HEADER)
            for part, rounds in zip(parts, (head, piece, rest), strict=True):
                part += [(choice, rounds)] if rounds else []
        self._held.clear()
        return [*parts[0], *parts[1], *parts[2]]

    def piece(self, choice: int, rounds: list[RequestOutput], events: str) -> str:
        """Return what is left to send of the events of a piece."""
        last, before = self._last, tuple(self._sent)
        after = self._sent[choice] = before[choice].plus(rounds)
        if last is not None and last.sent[choice].reaches(after):
            return ""
        return self._label(events, "s", before, (choice, after))

    def _label(self, text: str, stage: str, sent: tuple[Sent, ...], group: tuple[int, Sent] | None = None) -> str:
        """Return the events of a group that the client does not have, with ids; `sent` is from before the group."""
        if self._id is None:
            self.num_events += text.count("\n\n")
            return text
        last = self._last
        num_done = last.num_done if last and (last.stage, last.group) == (stage, group) else 0
        events, labelled = text.split("\n\n")[:-1], []
        for number, event in enumerate(events, 1):
            self.num_events += 1
            if number <= num_done:
                continue
            place = replace(self._id, num_events=self.num_events, stage=stage, num_done=number, sent=sent, group=group)
            if group and number == len(events):
                place = replace(place, num_done=0, sent=tuple(self._sent), group=None)
            labelled.append(f"{event}\nid: {place}\n\n")
        return "".join(labelled)


def event_ids(
    writer: Writer, params: SamplingParams, last_event_id: str | None, *, is_seeded: bool
) -> tuple[EventIds, int]:
    """Return the ids of an answer's events and the seed to draw, and make the answer the one that is continued.

    Events have ids if target, request and seed determine the text. Raises RequestError if it cannot be continued.
    """
    reply, num_choices, seed = writer.reply, len(writer.choices), secrets.randbits(63)
    has_ids = is_seeded and writer.request.stream and num_choices <= MAX_CHOICES
    if last_event_id is None and not has_ids:
        return EventIds(None, num_choices), seed
    answer = EventId(reply.id, reply.created, seed, _digest(reply, params))
    if last_event_id is None:
        return EventIds(answer, num_choices), seed
    if not writer.request.stream:
        raise RequestError(f"{HEADER} is only allowed with stream", HEADER)
    if not is_seeded:
        raise RequestError(f"{HEADER} needs the coupled rule: with this server's, a repeated text differs", HEADER)
    last = read_id(last_event_id, num_choices)
    if last.digest != answer.digest:
        raise RequestError(f"{HEADER} is of another request, or of a server that writes other texts", HEADER)
    writer.reply = replace(reply, id=last.reply_id, created=last.created)
    return EventIds(last, num_choices, is_continued=True), last.seed


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
    first_trace = second_trace = output.trace
    if output.trace is not None:
        first_trace = RoundTrace(output.trace.texts[:num_tokens], [], [], [])
        second_trace = _rest(output.trace, num_tokens)
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


def _rest(trace: RoundTrace, num_tokens: int) -> RoundTrace:
    """Return what is left of a round after some of its tokens: of the draft, what is below the last of them."""
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
