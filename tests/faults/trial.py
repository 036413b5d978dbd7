"""Trial: one fault under the eight streams, and what the clients saw of it."""

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp

from tests.faults.faults import Fault
from tests.faults.server import FaultServer
from tests.faults.streams import REQUESTS, Received, open_session, receive, receive_all

_PROBE = {"prompt": "x", "max_tokens": 1, "stream": True}
_PROBE_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Reference:
    """The streams without faults, and how long they take."""

    streams: list[Received]
    duration_s: float

    def differences(self, streams: dict[int, Received]) -> dict[int, str]:
        """Return how streams differ, by their index; those that do not are left out."""
        found = {index: stream.difference(self.streams[index]) for index, stream in streams.items()}
        return {index: difference for index, difference in found.items() if difference is not None}


@dataclass(frozen=True, slots=True)
class Trial:
    """What the clients saw of a fault.

    Attributes:
        struck_after_s: when the fault came, since the streams began.
        back_after_s: how long after the fault a new request was answered.
        differing: by the index of a stream, how it differs from the reference.
        differing_again: how those of them still differ for which the client has sent the request again.
    """

    fault: Fault
    struck_after_s: float
    back_after_s: float
    streams: list[Received]
    differing: dict[int, str]
    differing_again: dict[int, str]

    @property
    def longest_gap_s(self) -> float:
        return max(stream.longest_gap_s for stream in self.streams)

    @property
    def problems(self) -> list[str]:
        """What must not be: a difference, unless the connection was cut; then, a difference when it is sent again."""
        problems = [f"stream {index}, sent again: {text}" for index, text in self.differing_again.items()]
        if not self.fault.cuts_streams:
            problems += [f"stream {index}: {text}" for index, text in self.differing.items()]
        return problems


async def run_reference(server: FaultServer) -> Reference:
    """Run the streams twice, the first time to fill caches."""
    async with open_session(server.url) as session:
        await receive_all(session)
        started = time.monotonic()
        streams = await receive_all(session)
        return Reference(streams, time.monotonic() - started)


async def run_trial(server: FaultServer, fault: Fault, reference: Reference, seed: int) -> Trial:
    """Run the streams, and strike at a random moment of their first half."""
    delay_s = random.Random(seed).uniform(0.05, 0.5) * reference.duration_s
    async with open_session(server.url) as session:
        running = asyncio.create_task(receive_all(session))
        await asyncio.sleep(delay_s)
        fault.strike(await asyncio.to_thread(server.process, fault.process, fault.position))
        back_after_s = await _probe(session)
        streams = await running
        differing = reference.differences(dict(enumerate(streams)))
        again = await asyncio.gather(*(receive(session, *REQUESTS[index]) for index in differing))
    differing_again = reference.differences(dict(zip(differing, again, strict=True)))
    return Trial(fault, delay_s, back_after_s, streams, differing, differing_again)


async def _probe(session: aiohttp.ClientSession) -> float:
    started = time.monotonic()
    while not (await receive(session, "/v1/completions", _PROBE)).has_ended:
        await asyncio.sleep(_PROBE_PAUSE_S)
    return time.monotonic() - started
