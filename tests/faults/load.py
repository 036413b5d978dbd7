"""Load: clients that send the same requests over and over, streamed or not, and give some up."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.faults.answers import Answers
from tests.faults.streams import REQUESTS, receive

MAX_TOKENS = 96
ABORTED = 0.15
"""Which part of the requests are given up."""
LONGEST_PATIENCE_S = 1.5
HANG_S = 90.0
"""A request that takes longer hangs: no fault takes half as long to recover from."""
REFUSED = "queue_full"

_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
_MORE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "JSON: ", "seed": 11, "structured_outputs": {"json": _SCHEMA}}),
    ("/v1/completions", {"prompt": "yes or no?", "seed": 12, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/completions", {"prompt": "def f", "seed": 13, "n": 3, "logprobs": 1, "max_tokens": 24}),
    ("/v1/completions", {"prompt": "Echo", "seed": 14, "echo": True, "logprobs": 1, "max_tokens": 32}),
    ("/v1/completions", {"prompt": "The " * 200, "seed": 15, "max_tokens": 16}),
    ("/v1/completions", {"prompt": "x", "seed": 16, "max_tokens": 1}),
]
_BURST = {"prompt": "This PEP", "seed": 17, "max_tokens": 32, "ignore_eos": True}


def _short(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    tokens = {"max_tokens": min(body.get("max_tokens", MAX_TOKENS), MAX_TOKENS)}
    if "min_tokens" in body:
        tokens["min_tokens"] = MAX_TOKENS // 2
    return path, {**body, **tokens, "return_token_ids": True}


POOL = [_short(*request) for request in [*REQUESTS, *_MORE, ("/v1/completions", _BURST)]]
BURST = len(POOL) - 1
"""The index of the request that bursts are made of."""


@dataclass(slots=True)
class Load:
    """What was sent, and what came back.

    Attributes:
        answers: to the requests of `POOL`.
        outcomes: requests by how they ended: same, aborted, refused, different, failed, hung.
        problems: what must not happen, in words.
        latencies_s: of the requests that ended as they should.
    """

    session: aiohttp.ClientSession
    answers: Answers = field(default_factory=lambda: Answers(POOL))
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0

    async def be_a_client(self, choices: random.Random, deadline: float) -> None:
        while time.monotonic() < deadline:
            index = choices.randrange(BURST)
            patience_s = choices.uniform(0.0, LONGEST_PATIENCE_S) if choices.random() < ABORTED else None
            await self.send(index, is_stream=choices.random() < 0.6, patience_s=patience_s)

    async def burst(self, number: int) -> None:
        await asyncio.gather(*(self.send(BURST, is_stream=number % 2 == 0) for number in range(number)))

    async def check_all(self) -> None:
        for index in range(len(POOL)):
            await self.send(index, is_stream=index % 2 == 0)

    async def send(self, index: int, *, is_stream: bool, patience_s: float | None = None) -> None:
        """Send a request, and note how it ended."""
        path, body = POOL[index]
        body = _streamed(body) if is_stream else {**body, "stream": False, "stream_options": None}
        started = time.monotonic()
        try:
            async with asyncio.timeout(HANG_S if patience_s is None else patience_s):
                received = await receive(self.session, path, body, num_reconnects=0)
        except TimeoutError:
            self._end("hung" if patience_s is None else "aborted", f"request {index}")
            return
        seconds = time.monotonic() - started
        form = f"request {index} ({'streamed' if is_stream else 'whole'}, {seconds:.1f} s)"
        if received.code == REFUSED:
            self._end("refused", form)
        elif received.error is not None or not received.has_ended:
            self._end("failed", f"{form}: {received.error or 'no end'}")
        elif (difference := self.answers.difference(index, received)) is not None:
            self._end("different", f"{form}: {difference}")
        else:
            self._end("same", form)
            self.latencies_s.append(seconds)
            self.longest_gap_s = max(self.longest_gap_s, received.longest_gap_s)

    def _end(self, outcome: str, description: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in ("different", "failed", "hung"):
            self.problems.append(f"{outcome}: {description}")


def _streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
