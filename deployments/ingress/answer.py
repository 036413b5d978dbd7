"""Answer: the response to one request, as one body or as server-sent events.

Many log probabilities, such as those of a long prompt, take a second to write. That is done on a thread, one answer at
a time, while the event loop streams.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from deployments.errors import describe
from deployments.ingress.idle_timer import IdleTimer
from deployments.openai.choices import Choice
from deployments.openai.fields import ResponseModel
from deployments.openai.logprobs import num_logprobs
from deployments.openai.writer import Writer
from deployments.router.generation import choice_index
from engine.sequence import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


KEEP_ALIVE_S = 10.0
"""How long a stream may be silent: load balancers close connections that are, after 15 to 60 s."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients ignore."""
MANY_LOGPROBS = 2048
"""More of them take longer than a few milliseconds to write."""

T = TypeVar("T")
_writing = ThreadPoolExecutor(1, "long answers")


class Outputs(Protocol):
    """The outputs of one request, as a Router sends them."""

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last ones. It may be cancelled, and loses nothing then."""
        ...

    async def close(self) -> None:
        """End the request, finished or not; the Router frees its blocks."""
        ...


class Answer:
    """One response. Its holder must close it: if the client has left, closing it ends the request in the Router."""

    def __init__(self, writer: Writer, outputs: Outputs, *, hides_token: bool = False) -> None:
        """Make the answer that `writer` writes from `outputs`.

        Args:
            hides_token: hide the token generated for `max_tokens: 0`, so that the answer has only the prompt's scores.
        """
        self._writer = writer
        self._outputs = outputs
        self._hides_token = hides_token
        self._first: list[RequestOutput] | None = None
        self._idle = IdleTimer(KEEP_ALIVE_S)

    async def whole(self) -> str:
        """Wait for all tokens and return the body."""
        while outputs := await self._next():
            for output in outputs:
                self._writer.choices[choice_index(output.request_id)].append(output)
        return await _run(self._body, is_long=_has_many_logprobs(self._writer.choices))

    async def start(self) -> None:
        """Wait for the first tokens, but no longer than `KEEP_ALIVE_S`.

        An error meanwhile can still be sent as an HTTP status.
        """
        self._first = await self._idle.wait(self._next())

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of a stream that has been started; an error becomes an event."""
        writer = self._writer
        try:
            for event in writer.opening():
                yield writer.frame(event)
            outputs = self._first
            while outputs is None or outputs:
                if outputs is None:
                    yield KEEP_ALIVE
                elif text := await _run(self._frames, outputs, is_long=_has_many_logprobs(outputs)):
                    yield text
                outputs = await self._idle.wait(self._next())
            is_long = writer.repeats_all and _has_many_logprobs(writer.choices)
            if text := await _run(self._closing, is_long=is_long):
                yield text
        except Exception as error:
            kind, body = describe(error)
            if kind.status == 500:
                logger.exception("request %s failed", writer.id)
            yield writer.frame(writer.failed(body["error"]))
        yield writer.end()

    async def close(self) -> None:
        """End the request, finished or not."""
        self._idle.close()
        await self._outputs.close()

    async def _next(self) -> list[RequestOutput]:
        outputs = await self._outputs.next()
        return list(map(_without_token, outputs)) if self._hides_token else outputs

    def _body(self) -> str:
        return self._writer.whole().to_json()

    def _closing(self) -> str:
        return "".join(map(self._writer.frame, self._writer.closing()))

    def _frames(self, outputs: list[RequestOutput]) -> str:
        return "".join(map(self._writer.frame, self._chunks(outputs)))

    def _chunks(self, outputs: list[RequestOutput]) -> Iterator[ResponseModel]:
        """Add outputs to their choices; return the events, choice by choice."""
        by_choice: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            by_choice.setdefault(choice_index(output.request_id), []).append(output)
        for index, rounds in by_choice.items():
            choice = self._writer.choices[index]
            for output in rounds:
                choice.append(output)
            yield from self._writer.chunk(choice, _join(rounds))


async def _run(function: Callable[..., T], *args: Any, is_long: bool) -> T:
    """Call a function, on the thread if it takes long."""
    if is_long:
        return await asyncio.get_running_loop().run_in_executor(_writing, function, *args)
    return function(*args)


def _has_many_logprobs(sources: Sequence[Choice | RequestOutput]) -> bool:
    return sum(num_logprobs(entry.logprobs) + num_logprobs(entry.prompt_logprobs) for entry in sources) > MANY_LOGPROBS


def _without_token(output: RequestOutput) -> RequestOutput:
    """Hide the token that was generated for `max_tokens: 0`."""
    return replace(
        output,
        token_ids=[],
        text="",
        logprobs=None if output.logprobs is None else [],
        finish_reason="length",
        stop_reason=None,
    )


def _join(rounds: list[RequestOutput]) -> RequestOutput:
    """Join the outputs of several rounds of one sequence."""
    first, last = rounds[0], rounds[-1]
    if first is last:
        return first
    logprobs = None if first.logprobs is None else [entry for output in rounds for entry in output.logprobs or []]
    return replace(
        last,
        token_ids=[token for output in rounds for token in output.token_ids],
        text="".join(output.text for output in rounds),
        logprobs=logprobs,
        num_draft_tokens=sum(output.num_draft_tokens for output in rounds),
        num_accepted_tokens=sum(output.num_accepted_tokens for output in rounds),
        prompt_logprobs=first.prompt_logprobs,
    )
