"""The model of one group in the simulated cluster: how long its rounds take, without tensors or tokens.

A round takes a fixed time, more for each running stream, and more for each prompt token in it; each running stream gets
so many tokens per round. Between two events, rounds are not counted one by one: their rate is constant.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from tests.bench.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """One speculation group: its speed, its bounds, its GPUs."""

    round_ms: float
    """A round without streams."""
    stream_ms: float
    """What each running stream adds to a round."""
    prompt_token_ms: float
    """What each prompt token adds to a round."""
    tokens_per_round: float
    """Tokens that each stream gets in a round: one and the accepted drafts."""
    chunk_tokens: int = 512
    """Prompt tokens in a round at most."""
    max_num_seqs: int = 32
    max_queued_requests: int = 256
    num_gpus: int = 1

    def round_s(self, num_streams: int, num_prompt_tokens: float) -> float:
        """Return the seconds of a round with so many running streams and prompt tokens."""
        return (self.round_ms + self.stream_ms * num_streams + self.prompt_token_ms * num_prompt_tokens) / 1e3


@dataclass(slots=True)
class Job:
    """One request in the cluster, and what came of it."""

    arrival: Arrival
    prompt_left: float
    tokens_left: float
    started_s: float | None = None
    """When a group first read of its prompt."""
    first_token_s: float | None = None
    finished_s: float | None = None
    num_losses: int = 0
    num_before: int = 0
    """Requests that its group had when it came."""

    @classmethod
    def of(cls, arrival: Arrival) -> "Job":
        """Return a request that nothing was done for."""
        return cls(arrival, arrival.num_prompt_tokens, arrival.num_tokens)


@dataclass(slots=True)
class GroupModel:
    """A group that takes rounds while it has work. Times are seconds of the simulation, and never go back."""

    costs: GroupCosts
    now_s: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: deque[Job] = field(default_factory=deque)
    _streams: list[tuple[float, int, Job]] = field(default_factory=list)
    """Running streams by the progress at which they end."""
    _progress: float = 0.0
    """Tokens that a stream would have got that had always been running."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def num_requests(self) -> int:
        """Requests that run and wait."""
        return len(self._streams) + len(self.prefilling) + len(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether further requests are refused."""
        return len(self.waiting) >= self.costs.max_queued_requests

    def add(self, job: Job) -> None:
        """Take a request, now."""
        job.num_before = self.num_requests
        self.waiting.append(job)
        self._admit()

    def next_event_s(self) -> float:
        """Return when the next prompt is read or the next stream ends, if nothing is added before."""
        token_s, prompt_token_s = self._paces()
        ends = [math.inf]
        if self.prefilling:
            ends.append(self.prefilling[0].prompt_left * prompt_token_s)
        if self._streams:
            ends.append((self._streams[0][0] - self._progress) * token_s)
        return self.now_s + max(0.0, min(ends))

    def advance(self, now_s: float) -> list[Job]:
        """Work until a time that is not after the next event; return what finished."""
        token_s, prompt_token_s = self._paces()
        elapsed_s, self.now_s = now_s - self.now_s, now_s
        if self._streams:
            self._progress += elapsed_s / token_s
        if self.prefilling:
            job = self.prefilling[0]
            job.prompt_left -= elapsed_s / prompt_token_s
            if job.prompt_left <= 1e-6:
                self._start_stream(self.prefilling.popleft())
        finished = []
        while self._streams and self._streams[0][0] <= self._progress + 1e-6:
            job = heapq.heappop(self._streams)[2]
            job.finished_s, job.tokens_left = now_s, 0.0
            finished.append(job)
        self._admit()
        return finished

    def lose(self) -> list[Job]:
        """Return all requests, to be continued elsewhere: what was generated is part of the prompt then."""
        jobs = [*self.prefilling, *self.waiting]
        for end, _, job in self._streams:
            job.tokens_left = end - self._progress
            jobs.append(job)
        for job in jobs:
            job.num_losses += 1
            job.prompt_left = job.arrival.num_prompt_tokens + job.arrival.num_tokens - job.tokens_left
        self.waiting.clear()
        self.prefilling.clear()
        self._streams.clear()
        return jobs

    def _paces(self) -> tuple[float, float]:
        """Return the seconds per token of each stream, and per prompt token."""
        chunk = self.costs.chunk_tokens if self.prefilling else 0
        round_s = self.costs.round_s(len(self._streams), chunk)
        return round_s / self.costs.tokens_per_round, round_s / self.costs.chunk_tokens

    def _start_stream(self, job: Job) -> None:
        if job.first_token_s is None:
            job.first_token_s = self.now_s
        job.tokens_left -= 1
        heapq.heappush(self._streams, (self._progress + job.tokens_left, next(self._numbers), job))

    def _admit(self) -> None:
        while self.waiting and len(self._streams) + len(self.prefilling) < self.costs.max_num_seqs:
            self.prefilling.append(self.waiting.popleft())
        if self.prefilling and self.prefilling[0].started_s is None:
            self.prefilling[0].started_s = self.now_s
