"""Answer: one response on its way to a client, whole or as server-sent events."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace

from deployments.errors import describe
from deployments.openai.bodies import ResponseModel
from deployments.openai.writer import ResponseWriter
from deployments.router.generation import choice_index
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
        """Wait for the first tokens, so that a refusal still has a status, then return the events."""
        first: list[RequestOutput] = await anext(self._rounds, [])
        return self._events(first)

    async def _events(self, outputs: list[RequestOutput]) -> AsyncGenerator[str, None]:
        writer = self._writer
        try:
            for event in writer.opening():
                yield writer.frame(event)
            while outputs:
                if text := "".join(map(writer.frame, self._chunks(outputs))):
                    yield text
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

    def _chunks(self, outputs: list[RequestOutput]) -> Iterator[ResponseModel]:
        """Add a delivery to the choices; return its events, one after the other for each choice."""
        by_choice: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            by_choice.setdefault(choice_index(output.request_id), []).append(output)
        for index, rounds in by_choice.items():
            choice = self._writer.choices[index]
            for output in rounds:
                choice.append(output)
            yield from self._writer.chunk(choice, _joined(rounds))


def _joined(rounds: list[RequestOutput]) -> RequestOutput:
    """Return several rounds of one sequence as if they had been one."""
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
