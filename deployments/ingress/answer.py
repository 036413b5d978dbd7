"""Answer: the response to one request, as one body or as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.errors import describe
from deployments.ingress.event_ids import EventIds
from deployments.observe.tracing import note_answer
from deployments.openai.logprobs import num_logprobs
from deployments.openai.types import to_json
from deployments.openai.writer import Choice, Writer
from deployments.routing.resumable_stream import ResumableStream
from deployments.wire import choice_index
from engine.requests.output import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


KEEP_ALIVE_S = 10.0
"""How long a stream may be silent: load balancers close silent connections after 15 to 60 s."""
KEEP_ALIVE = ": keep-alive\n"
"""A comment without an empty line: OpenAI's client takes an empty line after an event's id for another event."""
MANY_LOGPROBS = 2048
"""More log probabilities take longer than a few milliseconds to write."""
MANY_CHARS = 4096
"""More characters may take longer than 30 milliseconds to read, in the worst case of a form of calls."""

T = TypeVar("T")
_writing = ThreadPoolExecutor(1, "long answers")  # up to a second each, which must not stop the event loop


class Answer(StreamingResponse):
    """One response; when it ends, for any reason, its request in the Router ends, too."""

    def __init__(
        self,
        writer: Writer,
        outputs: ResumableStream,
        ids: EventIds,
        keep: Callable[[], None] | None = None,
        *,
        hides_token: bool = False,
    ) -> None:
        """Answer in the form of `writer`, and `keep` the answer once it is whole.

        `hides_token` hides the token generated for `max_tokens: 0`.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)
        self._writer = writer
        self._outputs = outputs
        self._ids = ids
        self._keep = keep
        self._hides_token = hides_token
        self._first: list[RequestOutput] | None = None

    async def begin(self) -> Response:
        """Return the whole body when it is complete, or this object to stream, after its first tokens or a wait."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            if self._writer.request.stream:
                self._first = await self._next_or_idle()
                stack.pop_all()
                return self
            while outputs := await self._next():
                for output in outputs:
                    self._writer.choices[choice_index(output.request_id)].append(output)
            is_long = self._writer.record is not None or _is_long(self._writer.choices)
            body = await _run(lambda: to_json(self._writer.whole()), is_long=is_long)
            if self._keep:
                self._keep()
        return Response(body, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()

    async def _events(self) -> AsyncGenerator[str, None]:
        writer = self._writer
        try:
            if text := self._ids.opening():
                yield text
            outputs = self._first
            while outputs is None or outputs:
                if outputs is None:
                    yield KEEP_ALIVE
                else:  # a continued stream is silent up to the client's last event
                    yield await _run(self._chunks, outputs, is_long=_is_long(outputs)) or KEEP_ALIVE
                outputs = await self._next_or_idle()
            is_long = writer.record is not None or (writer.REPEATS_ALL and _is_long(writer.choices))
            if text := await _run(self._ids.closing, is_long=is_long):
                yield text
            if self._keep:
                self._keep()
        except Exception as error:
            kind, body = describe(error)
            if kind.status == 500:
                logger.exception("request %s failed", writer.reply.id)
            yield self._ids.failed(body)
        yield writer.END

    async def _close(self) -> None:
        try:
            note_answer(self._writer)
        finally:
            await self._outputs.close()

    async def _next(self) -> list[RequestOutput]:
        outputs = await self._outputs.next()
        return list(map(_without_token, outputs)) if self._hides_token else outputs

    async def _next_or_idle(self) -> list[RequestOutput] | None:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S) as idle:
                return await self._next()
        except TimeoutError:
            if not idle.expired():
                raise
            return None

    def _chunks(self, outputs: list[RequestOutput]) -> str:
        by_choice: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            by_choice.setdefault(choice_index(output.request_id), []).append(output)
        return "".join(self._ids.piece(index, rounds) for index, rounds in self._ids.pieces(by_choice))


async def _run(function: Callable[..., T], *args: Any, is_long: bool) -> T:
    if is_long:
        return await asyncio.get_running_loop().run_in_executor(_writing, function, *args)
    return function(*args)


def _is_long(sources: Sequence[Choice | RequestOutput]) -> bool:
    if sum(len(entry.text) for entry in sources) > MANY_CHARS:
        return True
    return sum(num_logprobs(entry.logprobs) + num_logprobs(entry.prompt_logprobs) for entry in sources) > MANY_LOGPROBS


def _without_token(output: RequestOutput) -> RequestOutput:
    hidden = None if output.logprobs is None else output.logprobs[:0]
    shown: dict[str, Any] = {"token_ids": [], "text": "", "logprobs": hidden, "trace": None}
    return replace(output, **shown, finish_reason="length", stop_reason=None, num_draft_tokens=0, num_accepted_tokens=0)
