"""Trial: one fault under the eight streams, and what the clients saw of it."""

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp

from tests.faults.answers import Answers
from tests.faults.faults import Fault
from tests.faults.server import FaultServer
from tests.faults.streams import NUM_TOKENS, REQUESTS, Received, open_session, receive, receive_all

_PROBE = {"prompt": "x", "max_tokens": 1, "stream": True}
_PROBE_PAUSE_S = 0.2
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Trial:
    """What the clients saw of a fault.

    Attributes:
        back_after_s: how long after the fault a new request was answered.
        differing: by the index of a stream, how it differs from the first one, or that from the target's own text.
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


async def run_trial(server: FaultServer, fault: Fault, answers: Answers, seed: int) -> Trial:
    """Run the streams, strike at a random moment of their first half, and audit what no trial before has received."""
    num_tokens = random.Random(seed).uniform(0.05, 0.5) * NUM_TOKENS * len(REQUESTS)
    streams = [Received() for _ in REQUESTS]
    async with open_session(server.url) as session:
        running = asyncio.create_task(receive_all(session, streams))
        while sum(stream.num_tokens for stream in streams) < num_tokens and not running.done():
            await asyncio.sleep(_POLL_S)
        fault.strike(await asyncio.to_thread(server.process, fault.process, fault.position))
        back_after_s = await _probe(session)
        await running
    differing = {index: answers.difference(index, stream) for index, stream in enumerate(streams)}
    found = {index: difference for index, difference in differing.items() if difference is not None}
    return Trial(fault, back_after_s, streams, found | await asyncio.to_thread(answers.audit))


async def _probe(session: aiohttp.ClientSession) -> float:
    started = time.monotonic()
    while not (await receive(session, "/v1/completions", _PROBE, num_reconnects=0)).has_ended:
        await asyncio.sleep(_PROBE_PAUSE_S)
    return time.monotonic() - started
