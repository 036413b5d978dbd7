"""An Ingress's inbox, as Routers send to it."""

from collections.abc import AsyncIterator

import pytest

from cluster.transport import InboxAddress, open_inbox
from deployments.wire import End, Message, Outputs, Report, decode
from engine.requests.output import RequestOutput
from tests.waiting import wait_for


class Mail:
    """The messages that have come, until the inbox closes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.address: InboxAddress

    async def open(self) -> None:
        self._server, self.address = await open_inbox("127.0.0.1", lambda data: self.messages.append(decode(data)))

    def close(self) -> None:
        self._server.close()

    async def until(self, count: int) -> list[Message]:
        await wait_for(lambda: len(self.messages) >= count)
        return self.messages

    async def outputs(self, count: int) -> list[RequestOutput]:
        """Return all outputs, once there are so many."""

        def come() -> list[RequestOutput]:
            return [output for message in self.messages if isinstance(message, Outputs) for output in message.outputs]

        await wait_for(lambda: len(come()) >= count)
        return come()

    async def end(self) -> tuple[Exception, str | None]:
        """Return the first error that comes, and who refused the request."""
        await wait_for(lambda: any(isinstance(message, End) for message in self.messages))
        end = next(message for message in self.messages if isinstance(message, End))
        return end.exception(), end.refused_by

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.messages if isinstance(message, Report)]


@pytest.fixture
async def mail() -> AsyncIterator[Mail]:
    mail = Mail()
    await mail.open()
    yield mail
    mail.close()
