"""A target on an event loop, as an engine sees one in other processes: it gets rounds, and computes them in order."""

import asyncio
from collections import deque

from engine.errors import TargetError


class OrderedTarget:
    """Passes rounds on to a verifier, one after the other, each some turns of the event loop after it was sent.

    Attributes:
        delay: how many turns a round waits.
        faults: what happens to the next rounds, one entry each: "before" (it is lost before it is computed), "after"
            (its verdicts are), or None.
        dies: whether a fault ends the target, so that later rounds fail, too, until `restart`.
        sizes: the number of rows of each round, as sent.
        last: the rows of the round that was sent last.
        most: the most rounds that were in flight.
    """

    def __init__(self, verifier, scheduler):
        self.verifier, self.scheduler = verifier, scheduler
        self.delay, self.faults, self.dies, self.is_dead = 0, deque(), False, False
        self.sizes, self.most, self.last = [], 0, []
        self._sent = deque()
        self._computing = None

    def verify(self, rows):
        self._check(rows)
        self.last = rows
        done = asyncio.get_running_loop().create_future()
        if self.is_dead:
            done.set_exception(TargetError("lost"))
        else:
            self._sent.append((rows, self.faults.popleft() if self.faults else None, done))
            self.sizes.append(len(rows))
            self.most = max(self.most, len(self._sent))
            if self._computing is None or self._computing.done():
                self._computing = asyncio.create_task(self._compute())
        return self._reply(done)

    async def _reply(self, done):
        return await done

    def restart(self):
        """Forget what is in flight, as another process that takes its place."""
        if self._computing is not None:
            self._computing.cancel()
        for _, _, done in self._sent:
            done.cancel()
        self._sent.clear()
        self.faults.clear()
        self.is_dead = False

    def release(self, request_id):
        self.verifier.release(request_id)

    async def _compute(self):
        while self._sent:
            for _ in range(self.delay):
                await asyncio.sleep(0)
            rows, fault, done = self._sent[0]
            self.is_dead = self.is_dead or bool(fault and self.dies)
            verdicts = None if fault == "before" or (self.is_dead and not fault) else await self.verifier.verify(rows)
            self._sent.popleft()
            if done.done():
                continue  # nobody waits any more, but it is computed
            if fault or verdicts is None:
                done.set_exception(TargetError("lost"))
            else:
                done.set_result(verdicts)

    def _check(self, rows):
        """Check that a round writes to no block of another running request, nor to one that others may share."""
        pool = self.scheduler.pool
        tables = {id(sequence.request): sequence.block_ids for sequence in self.scheduler.running}
        for row in rows:
            end = row.start + row.length + len(row.draft.token_ids)
            written = set(row.block_ids[row.start // pool.block_size : -(-end // pool.block_size)])
            assert id(row.request) in tables, "it was aborted before it was sent"
            assert all(written.isdisjoint(table) for owner, table in tables.items() if owner != id(row.request))
            assert written.isdisjoint(pool._digest_of)
            assert written.isdisjoint(pool._free)


class SlowDrafter:
    """Passes proposals on after some turns of the event loop; it sends one malformed draft when told to."""

    def __init__(self, drafter):
        self.drafter, self.delay, self.is_wrong = drafter, 0, False

    async def propose(self, rows):
        for _ in range(self.delay):
            await asyncio.sleep(0)
        drafts = await self.drafter.propose(rows)
        return drafts[1:] if self.is_wrong else drafts

    def release(self, request_id):
        self.drafter.release(request_id)


def alternate(engine, num_cohorts=2):
    """Make an engine run its rounds in so many cohorts."""
    engine.planner.choose_cohorts = lambda num_decoding: num_cohorts


def alternating(engine):
    """The engine in two cohorts, its target and drafter taking some turns of the event loop for each call."""
    engine.verifier = OrderedTarget(engine.verifier, engine.scheduler)
    engine.drafter = SlowDrafter(engine.drafter)
    engine.verifier.delay, engine.drafter.delay = 3, 1
    alternate(engine)
    return engine
