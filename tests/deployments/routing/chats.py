"""Chats over several Ingresses and Routers in virtual time: real choices and schedulers, without Ray and models."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from deployments.routing import loads as router_loads
from deployments.routing.choice import QueueDepthRouter
from deployments.routing.loads import RouterLoads
from deployments.routing.prefixes import landmarks, prefix_hashes
from deployments.wire import REPORT_INTERVAL_S, Generation, Report
from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.params import SamplingParams
from engine.protocols import Request, Verdict
from engine.requests.sequence import Sequence
from engine.scheduler import Scheduler

ROUND_S, TOKEN_S, TOKENS_PER_ROUND = 0.02, 100e-6, 4
CONFIG = EngineConfig(max_num_seqs=16, block_size=16, max_num_batched_tokens=1024, max_queued_requests=10_000)
NUM_BLOCKS, MAX_MODEL_LEN = 20_000, 32_768


@dataclass
class Turn:
    """One request of a chat; `num_known` tokens of its prompt were the chat's last prompt."""

    number: int
    num_known: int
    started_s: float
    ingress: "VirtualIngress"
    generation: Generation
    router: "VirtualRouter | None" = None
    first_token_s: float | None = None
    num_cached: int = 0

    @property
    def meets_its_prefix(self) -> bool:
        return self.num_cached >= self.num_known // CONFIG.block_size * CONFIG.block_size > 0


@dataclass
class Replica:
    replica_id: ReplicaID


class VirtualIngress:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.loads = RouterLoads(clock)
        self._router: Any = object.__new__(QueueDepthRouter)

    def choose(self, generation: Generation) -> str:
        router_loads.LOADS = self.loads
        self.loads.begin(generation.request_id, 1)
        metadata = RequestMetadata(generation.request_id, "internal")
        no_future: Any = None  # a real one would need an event loop
        pending = PendingRequest(args=[generation], kwargs={}, metadata=metadata, future=no_future)
        names: list[Any] = [Replica(ReplicaID(name, DeploymentID("Router"))) for name in sorted(self.loads.routers)]
        try:
            self._router.choose_replicas(names, pending).send(None)
        except StopIteration as chosen:
            return chosen.value[0][0].replica_id.unique_id
        raise AssertionError("a choice waits for nothing")


class VirtualRouter:
    def __init__(self, name: str, chats: "Chats") -> None:
        self.name = name
        self.scheduler = Scheduler(CONFIG, NUM_BLOCKS, MAX_MODEL_LEN)
        self.turns: dict[str, Turn] = {}
        self.prefixes: set[int] = set()
        self.is_alive = True
        self._chats = chats
        self._is_busy = False

    def submit(self, turn: Turn) -> None:
        generation = turn.generation
        turn.router = self
        self.turns[generation.request_id] = turn
        self.prefixes |= landmarks(generation.prefixes)
        [prompt] = generation.prompts
        request = Request(generation.request_id, list(prompt), len(prompt), generation.params)
        sequence = Sequence(request, frozenset(), None)
        sequence.resume(generation.output_token_ids.get(0, []))
        self.scheduler.add(sequence)
        if not self._is_busy:
            self._begin_round()

    def report(self) -> None:
        for ingress in self._chats.ingresses:
            num_yours = sum(turn.ingress is ingress for turn in self.turns.values())
            report = Report(self.name, None, len(self.turns), num_yours, prefixes=tuple(self.prefixes))
            ingress.loads.note(report)
        self.prefixes.clear()

    def _begin_round(self) -> None:
        batch = self.scheduler.next_batch(Plan(0))
        self._is_busy = bool(batch)
        if batch:
            seconds = ROUND_S + TOKEN_S * sum(row.length for row in batch)
            self._chats.after(seconds, lambda: self._end_round(batch))

    def _end_round(self, batch: list[Any]) -> None:
        if not self.is_alive:
            return
        verdicts = []
        for row in batch:
            is_at_tip = row.start + row.length == len(row.request.token_ids)
            tokens = [self._chats.rng.randrange(1 << 30) for _ in range(TOKENS_PER_ROUND if is_at_tip else 0)]
            verdicts.append(Verdict(tokens))
        for sequence, output in self.scheduler.commit(batch, verdicts):
            turn = self.turns[output.request_id]
            if turn.first_token_s is None:
                turn.first_token_s = self._chats.now - turn.started_s
                turn.num_cached = sequence.num_cached
            turn.generation.output_token_ids.setdefault(0, []).extend(output.token_ids)
            if output.finish_reason is not None:
                del self.turns[output.request_id]
                turn.ingress.loads.end(output.request_id)
                self._chats.end_turn(turn, sequence.request.token_ids)
        self._begin_round()


@dataclass
class Chats:
    """The simulation; `is_affine` off is the choice of the shorter queue of two, as without prefixes.

    Chats begin in bursts. Seven of ten share a system prompt; each turn comes to any Ingress.
    """

    num_routers: int = 4
    num_ingresses: int = 2
    num_turns: int = 10
    chats_per_s: float = 2.0
    system_length: int = 400
    is_affine: bool = True
    seed: int = 0
    now: float = 0.0
    done: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        random.seed(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._system = [self.rng.randrange(1 << 30) for _ in range(self.system_length)]
        self.ingresses = [VirtualIngress(lambda: self.now) for _ in range(self.num_ingresses)]
        self.routers: dict[str, VirtualRouter] = {}
        for number in range(self.num_routers):
            self.join(f"router {number}")

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), action))

    def join(self, name: str) -> None:
        self.routers[name] = VirtualRouter(name, self)
        self._tell()

    def kill(self, name: str) -> None:
        """End a Router; its requests resume at others, with the tokens so far."""
        router = self.routers.pop(name)
        router.is_alive = False
        self._tell()
        for turn in router.turns.values():
            turn.ingress.loads.end(turn.generation.request_id)
            turn.generation = replace(turn.generation, request_id=f"{turn.generation.request_id}~")
            self._submit(turn)

    def run(self, num_chats: int) -> None:
        with _restored_loads():
            started = 0.0
            for _ in range(num_chats):
                # Half of the chats begin together with the one before.
                started += self.rng.choice((0.0, self.rng.expovariate(self.chats_per_s / 2)))
                self.after(started, self._begin_chat)
            self.after(0.0, self._report)
            self._num_open = num_chats
            while self._num_open:
                self.now, _, action = heapq.heappop(self._events)
                action()

    def hit_share(self) -> float:
        """The share of turns after the first that find the blocks of their chat's last prompt."""
        later = [turn for turn in self.done if turn.number > 0]
        return sum(turn.meets_its_prefix for turn in later) / len(later)

    def first_token_s(self, percentile: float) -> float:
        seconds = sorted(turn.first_token_s for turn in self.done if turn.first_token_s is not None)
        return seconds[int(percentile / 100 * (len(seconds) - 1))]

    def end_turn(self, turn: Turn, token_ids: list[int]) -> None:
        self.done.append(turn)
        if turn.number + 1 == self.num_turns:
            self._num_open -= 1
            return
        pause_s = 0.3 + self.rng.expovariate(0.5)
        [prompt] = turn.generation.prompts
        text = [*token_ids, *self._message()]
        self.after(pause_s, lambda: self._begin_turn(text, turn.number + 1, len(prompt)))

    def _begin_chat(self) -> None:
        system = self._system if self.rng.random() < 0.7 else []
        self._begin_turn([*system, *self._message()], 0, 0)

    def _begin_turn(self, prompt: list[int], number: int, num_known: int) -> None:
        params = SamplingParams(max_tokens=self.rng.randint(8, 120))
        hashes = prefix_hashes(prompt, None) if self.is_affine else ()
        generation = Generation(f"request {next(self._ids)}", [prompt], params, 60.0, prefixes=hashes)
        self._submit(Turn(number, num_known, self.now, self.rng.choice(self.ingresses), generation))

    def _submit(self, turn: Turn) -> None:
        self.routers[turn.ingress.choose(turn.generation)].submit(turn)

    def _message(self) -> list[int]:
        length = self.rng.choice((20, 40, 60, 400))
        return [self.rng.randrange(1 << 30) for _ in range(length)]

    def _report(self) -> None:
        for router in self.routers.values():
            router.report()
        self.after(REPORT_INTERVAL_S, self._report)

    def _tell(self) -> None:
        for ingress in self.ingresses:
            ingress.loads.set_routers(self.routers)


@contextmanager
def _restored_loads() -> Iterator[None]:
    before = router_loads.LOADS
    try:
        yield
    finally:
        router_loads.LOADS = before
