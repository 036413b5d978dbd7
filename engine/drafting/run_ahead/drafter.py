"""RunAheadDrafter: after it has sent a draft, it goes on drafting for the likeliest verdicts.

This is Speculative Speculative Decoding (Kumar, Dao, May, 2603.03251), inside the drafter. The next request brings the
verdict; if a draft was prepared for it, that draft is ready. Verdicts are predicted from the draft's logits and the
noise that the target will draw with, which works at any temperature. Running ahead cannot change the text: the target
verifies a prepared draft like any other.

`advance` does one pass at a time, so that the drafter's owner can look for the next request in between. A request that
comes early finds shorter drafts; the missing tokens are drawn then, if the batch gains by waiting for them. Drafts that
need not wait are sent at once: the cache is brought up to date afterwards, by the first `advance`.
"""

import functools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafting.cached_prefix import Text
from engine.drafting.chain import Chain, Ranking
from engine.drafting.model import ModelDrafter
from engine.drafting.run_ahead.branches import Branches, Trunk
from engine.drafting.run_ahead.foresight import NUM_CANDIDATES, Foresight
from engine.drafting.run_ahead.pace import WIDTHS
from engine.drafting.run_ahead.passes import PassesAhead
from engine.execution.backend import Backend
from engine.protocols import Draft, ProposeRow
from engine.sampling.grammar import Grammars
from engine.verification.rule import RULES

_MAX_SCORES_BYTES = 1 << 28
"""Memory for a round's scores; if they would need more, only the highest of each row are kept."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The verdicts on the last drafts, and the drafts that are prepared for them.

    Attributes:
        rows: those of the proposal that brought the verdicts, with copies of the requests.
        verdicts: per row, how many tokens were accepted, and the token after them; None where that is not known.
        chosen: for rows with a branch for their verdict, the trunk and the index of that branch.
        chains: per row, the draft of that branch; empty where there is none.
    """

    rows: list[ProposeRow]
    verdicts: list[tuple[int, int] | None]
    chosen: dict[int, tuple[Trunk, int]]
    chains: list[Chain]


class RunAheadDrafter(PassesAhead, ModelDrafter):
    """A ModelDrafter that prepares the next drafts in `advance`; without calls of it, it drafts as its base does."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the draft's KV cache; `clock` (seconds, from any start) measures passes and rounds."""
        ModelDrafter.__init__(self, backend, config, token_limit=token_limit, ranks=True, grammars=grammars)
        PassesAhead.__init__(self, clock)
        self._depth = max(1, config.num_speculative_tokens)
        self._foresight = Foresight(self._depth, shares_noise=RULES[config.verification].shares_noise)
        self._trunks: dict[str, Trunk] = {}
        self._branches: Branches | None = None
        self._unsettled: _Outcome | None = None
        num_scores = config.max_num_seqs * WIDTHS[-1] * self._depth * self._vocab_size
        self._keeps_scores = num_scores * torch.float32.itemsize <= _MAX_SCORES_BYTES

    def release(self, request_id: str) -> None:
        """Free a request's blocks; if branches were growing for it, those of all requests are dropped."""
        try:
            self._settle()
        finally:
            if request_id in self._trunks:
                self.stop()
            super().release(request_id)

    def stop(self) -> None:
        """Drop all branches."""
        self._trunks = {}
        self._branches = self._work = self._unsettled = None

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        arrived = self._begin_proposal()
        # The outcome may be settled in a later call, and by then the requests' owner may have appended tokens.
        outcome = self._look_up([replace(row, request=row.request.copy()) for row in rows], arrived)
        rows, chains = outcome.rows, outcome.chains
        if self._is_worth_waiting(rows, chains):
            able = self._take_over(outcome)
            lacking = [i for i in able if len(chains[i].token_ids) < rows[i].num_draft_tokens]
            if lacking:
                self._draft_missing([rows[i] for i in lacking], [chains[i] for i in lacking])
            self._prepare([(rows[i], chains[i]) for i in able])
        else:
            self._unsettled = outcome
        self._pace.observe_answer()
        return [chain.draft() for chain in chains]

    def _look_up(self, rows: list[ProposeRow], arrived: float) -> _Outcome:
        """Find the verdicts on the last drafts, and the drafts that are prepared for them."""
        trunks = ((self._trunks.get(row.request.request_id), row.request.token_ids) for row in rows)
        verdicts = [trunk.verdict(token_ids) if trunk else None for trunk, token_ids in trunks]
        if any(verdict is not None for verdict in verdicts):
            # Exactly one round lies between the last proposal and this one, so the time between them is a round's.
            num_grown = 0 if self._branches is None else self._branches.num_computed
            # One late step costs less than fewer branches would.
            self._pace.observe_request(arrived, is_late=self._work is not None and self._depth - num_grown > 1)
        chosen: dict[int, tuple[Trunk, int]] = {}
        for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            branch = "stale" if verdict is None else self._find_branch(row, verdict)
            if not isinstance(branch, str):
                chosen[i] = branch
            if row.num_draft_tokens:
                self._count(branch if isinstance(branch, str) else None)
        chains = [Chain() for _ in rows]
        self._count_passes(is_used=bool(chosen))
        if chosen:
            assert self._branches is not None
            self.backend.wait()
            for i, chain in zip(chosen, self._branches.chains(list(chosen.values())), strict=True):
                chain.cut(rows[i].num_draft_tokens)
                chains[i] = chain
        return _Outcome(rows, verdicts, chosen, chains)

    @property
    def _is_settled(self) -> bool:
        return self._unsettled is None

    @torch.inference_mode()
    def _settle(self) -> None:
        """Bring the cache up to drafts that were sent as they were prepared, and prepare the next ones."""
        if self._unsettled is not None:
            outcome, self._unsettled = self._unsettled, None
            self._prepare([(outcome.rows[i], outcome.chains[i]) for i in self._take_over(outcome)])

    def _take_over(self, outcome: _Outcome) -> list[int]:
        """Learn from an outcome and bring the cache up to it; return the indices of rows that can get a draft."""
        self._work = None
        for row, verdict in zip(outcome.rows, outcome.verdicts, strict=True):
            if verdict is not None:
                self._foresight.learn(self._trunks[row.request.request_id], *verdict)
        if outcome.chosen:
            assert self._branches is not None
            tables = [self._prefixes[outcome.rows[i].request.request_id].block_ids for i in outcome.chosen]
            self._branches.move(list(outcome.chosen.values()), tables)
        for row, chain in zip(outcome.rows, outcome.chains, strict=True):
            if chain.token_ids:
                # The trunk was computed up to the verdict, and the branch from its root on.
                root, known = row.request.token_ids[-1], self._prefixes[row.request.request_id].token_ids
                known[len(row.request.token_ids) - 1 :] = [root, *chain.token_ids[:-1]]
        current = {row.request.request_id for row in outcome.rows}
        for name in self._trunks.keys() - current:
            self._trim(name, len(self._prefixes[name].token_ids))
        self.stop()
        return [i for i, row in enumerate(outcome.rows) if self._is_able(row, outcome.chains[i], current)]

    def _draft_missing(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> None:
        """Draw the tokens that are not prepared; the target waits for them."""
        missing = max(row.num_draft_tokens - len(chain.token_ids) for row, chain in zip(rows, chains, strict=True))
        started = self._clock()
        self._draft(rows, chains)
        self._pace.observe_late_steps(self._clock() - started, missing)

    def _ranking(self, scores: Tensor) -> Ranking:
        # Only branches whose verdict arrives need their top scores, so these are computed late if memory allows.
        ranking = Ranking(self._in_target_ids(scores))
        return ranking if self._keeps_scores else Ranking(*ranking.top(NUM_CANDIDATES))

    def _is_able(self, row: ProposeRow, chain: Chain, current: set[str]) -> bool:
        """Fit a row and its prepared draft into the cache; a row that does not fit loses its draft."""
        if not self._make_room(row, chain.token_ids, current):
            chain.cut(0)
            return False
        self._trim(row.request.request_id, len(row.request.token_ids) + row.num_draft_tokens)
        return True

    def _find_branch(self, row: ProposeRow, verdict: tuple[int, int]) -> tuple[Trunk, int] | str:
        """Return a row's trunk and the branch for its verdict, or the reason why there is none."""
        trunk, branches = self._trunks[row.request.request_id], self._branches
        if branches is None or not branches.num_computed or not trunk.roots:
            return "unprepared"
        if verdict not in trunk.roots:
            return "token"
        return trunk, trunk.roots.index(verdict)

    def _is_worth_waiting(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> bool:
        """Decide whether the whole batch waits until the missing tokens, if there are any, are drawn.

        It waits if that is expected to commit more tokens per second, by the times that were measured recently.
        """
        if all(len(chain.token_ids) == row.num_draft_tokens for row, chain in zip(rows, chains, strict=True)):
            return False
        if not any(chain.token_ids for chain in chains):
            return True
        now = sum(1 + self._foresight.accepted.expected(len(chain.token_ids)) for chain in chains)
        later = sum(1 + self._foresight.accepted.expected(row.num_draft_tokens) for row in rows)
        missing = max(row.num_draft_tokens - len(chain.token_ids) for row, chain in zip(rows, chains, strict=True))
        return self._pace.slowdown(missing) < later / now

    def _prepare(self, drafted: Sequence[tuple[ProposeRow, Chain]]) -> None:
        """Plan the drafts for the likeliest verdicts on what was just proposed; `advance` makes them."""
        self._depth = max((row.num_draft_tokens for row, _ in drafted), default=0) or self._depth
        trunks = [Trunk(row.request, chain) for row, chain in drafted]
        self._trunks = {trunk.request.request_id: trunk for trunk in trunks}
        self._work = self._grow(trunks)

    def _grow(self, trunks: Sequence[Trunk]) -> Generator[None, None, None]:
        """Choose the verdicts to draft for and grow a branch for each, yielding after every forward pass."""
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
            runs = functools.partial(
                self._runs, requests, branches.depths(), lambda: self._branch_paths(branches), branches.tips()
            )
            drawn = self._pass(branches.next_pass(tokens), draws, runs)
            branches.add(drawn)
            tokens = drawn.tokens
            yield

    def _branch_paths(self, branches: Branches) -> list[list[list[int]]]:
        self.backend.wait()
        return branches.paths()

    def _make_scratch(self, trunk: Trunk, width: int) -> bool:
        """Reserve places for a trunk's branches in free blocks; return whether there are enough."""
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
        """Compute every trunk to its end, and choose verdicts by what the draft would have drawn at each position."""
        texts = [Text(trunk.request.token_ids, trunk.chain.token_ids) for trunk in trunks]
        prefixes = [self._prefixes[trunk.request.request_id] for trunk in trunks]
        batch = yield from self._catch_up(texts, prefixes)
        requests = [trunk.request for trunk in trunks]
        depths = [[len(trunk.chain.token_ids)] for trunk in trunks]
        (draws,) = self._plan([request.params for request in requests], [text.length for text in texts], 1)
        runs = functools.partial(self._runs, requests, depths, lambda: [[trunk.chain.token_ids] for trunk in trunks])
        drawn = self._pass(batch, draws, runs)
        for text, prefix in zip(texts, prefixes, strict=True):
            prefix.token_ids += text.part(len(prefix.token_ids), text.length)
        assert drawn.ranking is not None
        yield
        self._foresight.look(trunks, drawn.ranking)
        for trunk in trunks:
            params = trunk.request.params
            eos = () if params.ignore_eos else self.backend.info.eos_token_ids
            self._foresight.choose_roots(trunk, width, {*eos, *params.stop_token_ids})
