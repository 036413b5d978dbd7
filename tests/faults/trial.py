"""Trial: one fault under the eight streams, and what the clients saw of it."""

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp

from tests.faults.faults import Fault
from tests.faults.server import FaultServer
from tests.faults.streams import Received, open_session, receive, receive_all

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
        back_after_s: how long after the fault a new request was answered.
        differing: by the index of a stream, how it differs from the reference.
    """

    fault: Fault
    back_after_s: float
    streams: list[Received]
    differing: dict[int, str]

    @property
    def longest_gap_s(self) -> float:
        return max(stream.longest_gap_s for stream in self.streams)

    @property
    def problems(self) -> list[str]:
        """What must not be: a difference, and a lost connection unless it ended at the process that was struck."""
        problems = [f"stream {index}: {text}" for index, text in self.differing.items()]
        num_cut = sum(stream.num_reconnects > 0 for stream in self.streams)
        if num_cut and not self.fault.cuts_streams:
            problems.append(f"{num_cut} streams lost their connections")
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
    return Trial(fault, back_after_s, streams, differing)


async def _probe(session: aiohttp.ClientSession) -> float:
    started = time.monotonic()
    while not (await receive(session, "/v1/completions", _PROBE, num_reconnects=0)).has_ended:
        await asyncio.sleep(_PROBE_PAUSE_S)
    return time.monotonic() - started
