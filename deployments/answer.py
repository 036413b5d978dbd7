"""Answer: one response on its way to a client, whole or as server-sent events."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator

from deployments.errors import describe
from deployments.generation import choice_index
from deployments.writing import ResponseWriter
from engine.sequence import RequestOutput

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows


class Answer:
    """One response on its way."""

    def __init__(self, writer: ResponseWriter, rounds: AsyncGenerator[list[RequestOutput], None]) -> None:
        self._writer = writer
        self._rounds = rounds

    async def whole(self) -> str:
        """Return the body, when all is generated."""
        try:
            async for outputs in self._rounds:
                for output in outputs:
                    self._writer.choices[choice_index(output.request_id)].append(output)
        finally:
            await self._rounds.aclose()
        return self._writer.whole().to_json()

    async def events(self) -> AsyncIterator[str]:
        """Wait for the first round, so that a refusal still has a status, then return the events."""
        first: list[RequestOutput] = await anext(self._rounds, [])
        return self._events(first)

    async def _events(self, outputs: list[RequestOutput]) -> AsyncGenerator[str, None]:
        writer = self._writer
        try:
            for event in writer.opening():
                yield writer.frame(event)
            while outputs:
                for output in outputs:
                    choice = writer.choices[choice_index(output.request_id)]
                    choice.append(output)
                    for event in writer.chunk(choice, output):
                        yield writer.frame(event)
                outputs = await anext(self._rounds, [])
            for event in writer.closing():
                yield writer.frame(event)
        except Exception as error:
            kind, body = describe(error)
            if kind.status == 500:
                logger.exception("request %s failed", writer.id)
            yield writer.frame(writer.failed(body["error"]))
        finally:
            await self._rounds.aclose()
        yield writer.end()
