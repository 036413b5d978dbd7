"""RunAheadDrafter: after it has answered, a drafter goes on drafting for the likeliest verdicts.

Speculative Speculative Decoding (Kumar, Dao, May, 2603.03251), inside the drafter: the next request brings the verdict,
and if it was among the guesses its draft is there at once. Guesses come from the draft's own logits with the noise that
the target will draw with, so they are good at any temperature. Nothing here can change a text: a prepared draft
is a draft like any other.

Work is done pass by pass through `advance`, so that whoever owns the drafter can look for the next request in between.
A request that comes early finds shorter drafts, and the missing tokens are drawn then. A draft that is ready leaves at
once: what has to be put in order after a verdict is the first thing `advance` does.
"""

import functools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.chain import Chain, Ranking
from engine.drafting.model import CachedPrefix, ModelDrafter
from engine.drafting.run_ahead.branches import Branches, Trunk
from engine.drafting.run_ahead.foresight import NUM_CANDIDATES, Foresight
from engine.drafting.run_ahead.pace import WIDTHS, Pace
from engine.execution.backend import Backend
from engine.protocols import Draft, ProposeRow
from engine.sampling.grammar import Grammars
from engine.stats import RunAheadStats
from engine.verification.rule import find_rule

_MAX_SCORES_BYTES = 1 << 28
"""What a round's scores may take; where the vocabulary is larger, only the best of them are kept."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of the last drafts.

    Attributes:
        rows: as they were when this was told.
        verdicts: per row, how many were accepted, and the token after; None where that is not known.
        chosen: by row, the branch that came true, with its trunk.
        chains: per row, what that branch has prepared.
    """

    rows: list[ProposeRow]
    verdicts: list[tuple[int, int] | None]
    chosen: dict[int, tuple[Trunk, int]]
    chains: list[Chain]


class RunAheadDrafter(ModelDrafter):
    """A model drafter that prepares for the next request; without calls of `advance` it is an ordinary one."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the draft's KV cache; `clock` (seconds, from any start) is what passes and rounds are measured with."""
        super().__init__(backend, config, token_limit=token_limit, ranks=True, grammars=grammars)
        self.stats = RunAheadStats()
        self._depth = max(1, config.num_speculative_tokens)
        self._foresight = Foresight(self._depth, shares_noise=find_rule(config.verification).shares_noise)
        self._trunks: dict[str, Trunk] = {}
        self._branches: Branches | None = None
        self._work: Generator[None, None, None] | None = None
        self._unsettled: _Outcome | None = None
        self._num_passes = 0
        self._clock = clock
        self._pace = Pace(clock)
        num_scores = config.max_num_seqs * WIDTHS[-1] * self._depth * self._vocab_size
        self._keeps_scores = num_scores * torch.float32.itemsize <= _MAX_SCORES_BYTES

    @property
    def has_time(self) -> bool:
        """Whether `advance` has something to do of which at least half is likely to fit before the next request."""
        return self._unsettled is not None or self._pace.has_time

    def advance(self) -> bool:
        """Put what came of the last drafts in order, or do one forward pass ahead; return whether there is more."""
        with torch.inference_mode():
            if self._unsettled is not None:
                self._settle()
            elif self._work is not None:
                self._step()
        return self._work is not None

    def release(self, request_id: str) -> None:
        """Free a request's blocks; if something was being prepared for it, that of the others is dropped with it."""
        try:
            self._settle()
        finally:
            if request_id in self._trunks:
                self.stop()
            super().release(request_id)

    def stop(self) -> None:
        """Drop what is prepared."""
        self._trunks = {}
        self._branches = self._work = self._unsettled = None

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        self._settle()
        # The outcome may be settled in a later call, and by then the requests' owner may have appended tokens.
        outcome = self._look_up([replace(row, request=row.request.copy()) for row in rows])
        rows, chains = outcome.rows, outcome.chains
        if all(len(chain.token_ids) == row.num_draft_tokens for row, chain in zip(rows, chains, strict=True)):
            self._unsettled = outcome
        else:
            able = self._take_over(outcome)
            lacking = [i for i in able if len(chains[i].token_ids) < rows[i].num_draft_tokens]
            if lacking and self._is_worth_waiting([rows[i] for i in able], [chains[i] for i in able]):
                self._draft_missing([rows[i] for i in lacking], [chains[i] for i in lacking])
            self._prepare([(rows[i], chains[i]) for i in able])
        self._pace.answered()
        return [chain.draft() for chain in chains]

    def _look_up(self, rows: list[ProposeRow]) -> _Outcome:
        """Find out what became of the last drafts, and what is prepared for that."""
        verdicts = [self._verdict(row) for row in rows]
        if any(verdict is not None for verdict in verdicts):
            # One round lies between the last proposal and this one, and the time between them is that round's.
            self._pace.asked(num_missing=0 if self._work is None else self._depth - self._num_grown())
        chosen: dict[int, tuple[Trunk, int]] = {}
        for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            found = "stale" if verdict is None else self._find_branch(row, verdict)
            if not isinstance(found, str):
                chosen[i] = found
                self.stats.hits += row.num_draft_tokens > 0
            elif row.num_draft_tokens:
                self.stats.misses[found] = self.stats.misses.get(found, 0) + 1
        chains = [Chain() for _ in rows]
        if chosen:
            assert self._branches is not None
            for i, chain in zip(chosen, self._branches.chains(list(chosen.values())), strict=True):
                chain.cut(rows[i].num_draft_tokens)
                chains[i] = chain
        else:
            self.stats.num_wasted += self._num_passes
        self._num_passes = 0
        return _Outcome(rows, verdicts, chosen, chains)

    @torch.inference_mode()
    def _settle(self) -> None:
        """Go on from drafts that were sent as they were prepared."""
        if self._unsettled is not None:
            outcome, self._unsettled = self._unsettled, None
            self._prepare([(outcome.rows[i], outcome.chains[i]) for i in self._take_over(outcome)])

    def _take_over(self, outcome: _Outcome) -> list[int]:
        """Learn from an outcome and bring the cache up to it; returns the rows that fit into it."""
        self._work = None
        for row, verdict in zip(outcome.rows, outcome.verdicts, strict=True):
            if verdict is not None:
                self._foresight.learn(self._trunks[row.request.request_id], *verdict)
        if outcome.chosen:
            assert self._branches is not None
            prefixes = [self._prefixes[outcome.rows[i].request.request_id] for i in outcome.chosen]
            self._move(list(zip(prefixes, outcome.chosen.values(), strict=True)), self._branches)
        for row, chain in zip(outcome.rows, outcome.chains, strict=True):
            if chain.token_ids:
                self._prefixes[row.request.request_id].token_ids = [*row.request.token_ids, *chain.token_ids[:-1]]
        current = {row.request.request_id for row in outcome.rows}
        for name in self._trunks.keys() - current:
            self._trim(name, len(self._prefixes[name].token_ids))
        self.stop()
        return [i for i, row in enumerate(outcome.rows) if self._is_able(row, outcome.chains[i], current)]

    def _draft_missing(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> None:
        """Draw what is not prepared while the target waits."""
        missing = max(row.num_draft_tokens - len(chain.token_ids) for row, chain in zip(rows, chains, strict=True))
        started = self._clock()
        self._draft(rows, chains)
        self._pace.drafted(self._clock() - started, missing)

    def _step(self) -> None:
        """Do one forward pass ahead."""
        assert self._work is not None
        started = self._clock()
        try:
            next(self._work)
            self._pace.passed(self._clock() - started)
        except StopIteration:
            self._work = None
            self._pace.finished()

    def _verdict(self, row: ProposeRow) -> tuple[int, int] | None:
        """Return what came of a row's last draft: how many accepted, and the token after; None if it is not known."""
        trunk = self._trunks.get(row.request.request_id)
        return None if trunk is None else trunk.verdict(row.request.token_ids)

    def _ranking(self, scores: Tensor) -> Ranking:
        # Only the branch that comes true needs its best scores found, so it is done late where memory allows it.
        ranking = Ranking(self._in_target_ids(scores))
        return ranking if self._keeps_scores else Ranking(*ranking.top(NUM_CANDIDATES))

    def _num_grown(self) -> int:
        return 0 if self._branches is None else self._branches.num_computed

    def _is_able(self, row: ProposeRow, chain: Chain, current: set[str]) -> bool:
        """Fit a row and what is prepared for it into the cache; nothing is drafted for one that does not fit."""
        if not self._make_room(row, [*row.request.token_ids, *chain.token_ids], current):
            chain.cut(0)
            return False
        self._trim(row.request.request_id, len(row.request.token_ids) + row.num_draft_tokens)
        return True

    def _find_branch(self, row: ProposeRow, verdict: tuple[int, int]) -> tuple[Trunk, int] | str:
        """Return a row's trunk and the branch that came true, or the reason why none did."""
        trunk, branches = self._trunks[row.request.request_id], self._branches
        if branches is None or not branches.num_computed or not trunk.roots:
            return "unprepared"
        if verdict not in trunk.roots:
            return "token"
        return trunk, trunk.roots.index(verdict)

    def _move(self, chosen: Sequence[tuple[CachedPrefix, tuple[Trunk, int]]], branches: Branches) -> None:
        """Bring the keys and values of the branches that came true to where they belong."""
        slots: tuple[list[int], list[int]] = ([], [])
        for prefix, (trunk, branch) in chosen:
            for own, places in zip(slots, branches.entries(trunk, branch), strict=True):
                own += [self._slot(prefix.block_ids, place) for place in places]
        sources, targets = (torch.tensor(own, device=self.backend.device) for own in slots)
        self._kv.move(sources, targets)

    def _slot(self, block_ids: Sequence[int], place: int) -> int:
        size = self._kv.block_size
        return block_ids[place // size] * size + place % size

    def _trim(self, request_id: str, length: int) -> None:
        """Give back a request's blocks beyond `length` tokens: only branches needed them."""
        prefix = self._prefixes[request_id]
        kept = self._pool.blocks_for(length)
        self._pool.free(prefix.block_ids[kept:])
        del prefix.block_ids[kept:]

    def _is_worth_waiting(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> bool:
        """Decide whether the whole batch waits until the drafts that are missing are drawn.

        It does if that commits more tokens per second: the target's time is what it took lately.
        """
        if not any(chain.token_ids for chain in chains):
            return True
        now = sum(1 + self._foresight.accepted.expected(len(chain.token_ids)) for chain in chains)
        later = sum(1 + self._foresight.accepted.expected(row.num_draft_tokens) for row in rows)
        missing = max(row.num_draft_tokens - len(chain.token_ids) for row, chain in zip(rows, chains, strict=True))
        return self._pace.slowdown(missing) < later / now

    def _prepare(self, drafted: Sequence[tuple[ProposeRow, Chain]]) -> None:
        """Begin to draft for the likeliest verdicts on what was just proposed."""
        self._depth = max((row.num_draft_tokens for row, _ in drafted), default=0) or self._depth
        trunks = [Trunk(row.request, chain) for row, chain in drafted]
        self._trunks = {trunk.request.request_id: trunk for trunk in trunks}
        self._work = self._grow(trunks)

    def _grow(self, trunks: Sequence[Trunk]) -> Generator[None, None, None]:
        """Find the verdicts to bet on and draft for each, stopping after every forward pass."""
        width = WIDTHS[self._pace.width]
        trunks = [trunk for trunk in trunks if self._make_scratch(trunk, width)]
        if not trunks:
            return
        yield from self._find_roots(trunks, width)
        trunks = [trunk for trunk in trunks if trunk.roots]
        if not trunks:
            return
        tables = [self._prefixes[trunk.request.request_id].block_ids for trunk in trunks]
        branches = self._branches = Branches(trunks, width, tables, self._kv)
        requests = [trunk.request for trunk in trunks]
        tokens = branches.roots
        params, positions = branches.draws()
        for draws in self._plan(params, positions, self._depth):
            runs = functools.partial(self._runs, requests, branches.depths(), branches.paths)
            drawn = self._pass(branches.next_pass(tokens), draws, runs)
            branches.add(drawn)
            tokens = drawn.tokens
            self._passed()
            yield

    def _make_scratch(self, trunk: Trunk, width: int) -> bool:
        """Reserve places for a trunk's branches, from blocks that nobody else uses."""
        length = trunk.base + len(trunk.chain.token_ids)
        if length + 1 + self._depth > self.backend.info.max_model_len:
            return False
        prefix = self._prefixes[trunk.request.request_id]
        blocks = self._pool.allocate(self._pool.blocks_for(length + width * self._depth) - len(prefix.block_ids))
        if blocks is None:
            return False
        prefix.block_ids += blocks
        return True

    def _find_roots(self, trunks: Sequence[Trunk], width: int) -> Generator[None, None, None]:
        """Compute every trunk to its end, and bet on verdicts by what the draft would have drawn."""
        texts = [[*trunk.request.token_ids, *trunk.chain.token_ids] for trunk in trunks]
        prefixes = [self._prefixes[trunk.request.request_id] for trunk in trunks]
        catching_up = self._catch_up(texts, prefixes)
        while True:
            try:
                next(catching_up)
            except StopIteration as end:
                batch = end.value
                break
            self._passed()
            yield
        requests = [trunk.request for trunk in trunks]
        depths = [[len(trunk.chain.token_ids)] for trunk in trunks]
        (draws,) = self._plan([request.params for request in requests], [len(text) for text in texts], 1)
        runs = functools.partial(self._runs, requests, depths, lambda: [[trunk.chain.token_ids] for trunk in trunks])
        drawn = self._pass(batch, draws, runs)
        for text, prefix in zip(texts, prefixes, strict=True):
            prefix.token_ids = text
        assert drawn.ranking is not None
        self._foresight.look(trunks, drawn.ranking)
        for trunk in trunks:
            params = trunk.request.params
            eos = () if params.ignore_eos else self.backend.info.eos_token_ids
            self._foresight.bet(trunk, width, {*eos, *params.stop_token_ids})
        self._passed()
        yield

    def _passed(self) -> None:
        self._num_passes += 1
        self.stats.num_forwards += 1
