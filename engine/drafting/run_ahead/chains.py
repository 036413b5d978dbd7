"""RunAheadDrafter: drafts for the likeliest verdicts on a draft that was sent, while the target verifies it.

This is Speculative Speculative Decoding (Kumar, Dao, May, 2603.03251), inside the drafter. The next request brings the
verdict. Complete drafts are sent at once, and `settle` then brings the cache up to date. Missing tokens are drawn at
the request, if the batch gains by waiting for them. Running ahead cannot change the text: the target verifies a
prepared draft like any other.

Why not trees of width 1: at temperature 0.8 with 5 passes a round, 32 requests of the bundled pair commit 4.5 % fewer
tokens a round. A pass takes the host twice as long, because trees rank the scores of every node. Nor can trees run
ahead for rules without shared noise.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import complete_chains
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_cache import make_cache
from engine.drafting.model.next_tokens import NUM_CANDIDATES
from engine.drafting.model.token_drawer import Chain, Drawn, TokenDrawer
from engine.drafting.run_ahead.branches import Branches, DraftContext, Verdict, VerdictPredictor
from engine.drafting.run_ahead.passes import WIDTHS, Pass, PassesAhead, Work
from engine.protocols import Draft, ProposeRow
from engine.verification.rule import rule_of

_MAX_SCORES_BYTES = 1 << 28
"""Memory for a round's scores; if they need more, only each row's highest scores are kept."""


@dataclass(slots=True)
class _Answer:
    """A row of a proposal, the verdict that it brought, and the draft prepared for that verdict."""

    row: ProposeRow
    verdict: tuple[DraftContext, Verdict] | None = None
    branch: tuple[DraftContext, int] | None = None
    """The context and the index of the branch for that verdict; None if no draft is prepared."""
    chain: Chain = field(default_factory=Chain)

    @property
    def num_missing(self) -> int:
        return self.row.num_draft_tokens - len(self.chain.token_ids)


class RunAheadDrafter(PassesAhead):
    """Drafts chains, and prepares the next chains between proposals."""

    def __init__(
        self, draft: DraftModel, config: EngineConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(draft.backend, clock)
        self.cache = make_cache(draft, config)
        self._depth = max(1, config.num_speculative_tokens)
        # Only branches whose verdict arrives need their top scores, so a CPU computes these late if memory allows.
        num_scores = config.max_num_seqs * WIDTHS[-1] * self._depth * draft.vocab_size
        is_late = draft.backend.device.type == "cpu" and num_scores * torch.float32.itemsize <= _MAX_SCORES_BYTES
        num_ranked = None if is_late else NUM_CANDIDATES
        self._drawer = TokenDrawer(draft, self.cache.kv, config, ranks=True, num_ranked=num_ranked)
        self._predictor = VerdictPredictor(self._depth, shares_noise=rule_of(config.verification).shares_noise)
        self._contexts: dict[str, DraftContext] = {}
        self._branches: Branches | None = None

    def release(self, request_id: str) -> None:
        """Free a request's blocks; if it has growing branches, drop all branches."""
        try:
            self.settle()
        finally:
            if request_id in self._contexts:
                self.stop()
            self.cache.release(request_id)
            self._drawer.release(request_id)

    def stop(self) -> None:
        self._contexts = {}
        self._branches = self._work = self._next_pass = self._unsettled = None

    def _propose(self, rows: list[ProposeRow], arrived: float) -> list[Draft]:
        answers = self._look_up(rows, arrived)
        if self._is_worth_waiting(answers):
            able = self._take_over(answers)
            if lacking := [answer for answer in able if answer.num_missing]:
                started, num_late = self.clock(), max(answer.num_missing for answer in lacking)
                complete_chains(
                    self._drawer, self.cache, [answer.row for answer in lacking], [answer.chain for answer in lacking]
                )
                self._pace.observe_late_steps(self.clock() - started, num_late)
            self._prepare(able)
        else:
            self._unsettled = lambda: self._prepare(self._take_over(answers))
        return [answer.chain.draft() for answer in answers]

    def _look_up(self, rows: Sequence[ProposeRow], arrived: float) -> list[_Answer]:
        answers = [_Answer(row) for row in rows]
        for answer in answers:
            request = answer.row.request
            context = self._contexts.get(request.request_id)
            if context is not None and (verdict := context.verdict(request.token_ids)) is not None:
                answer.verdict = context, verdict
            reason = self._find_branch(answer)
            if answer.row.num_draft_tokens:
                self._count(reason)
        if any(answer.verdict for answer in answers):
            # Exactly one round lies between the last proposal and this one, so their distance is a round's time.
            num_grown = 0 if self._branches is None else self._branches.num_computed
            # The target also waits for the rest of a pass under way; a wide pass may take most of a round.
            is_growing = num_grown < self._depth or self._is_mid_pass
            self._pace.observe_request(arrived, is_late=self._work is not None and is_growing)
        hits = [(answer, answer.branch) for answer in answers if answer.branch is not None]
        self._count_passes(is_used=bool(hits))
        if hits:
            assert self._branches is not None
            self._backend.wait()
            for (answer, _), chain in zip(hits, self._branches.chains([branch for _, branch in hits]), strict=True):
                chain.cut(answer.row.num_draft_tokens)
                answer.chain = chain
        return answers

    def _find_branch(self, answer: _Answer) -> str | None:
        """Set the branch for a row's verdict, or return why there is none."""
        if answer.verdict is None:
            return "stale"
        context, verdict = answer.verdict
        if self._branches is None or not self._branches.num_computed or not context.verdicts:
            return "unprepared"
        if verdict not in context.verdicts:
            return "token"
        answer.branch = context, context.verdicts.index(verdict)
        return None

    def _is_worth_waiting(self, answers: Sequence[_Answer]) -> bool:
        """Return whether waiting for missing tokens commits more tokens per second, by recent times."""
        if not any(answer.num_missing for answer in answers):
            return False
        if not any(answer.chain.token_ids for answer in answers):
            return True
        gains = self._predictor.gains()
        now = sum(1 + sum(gains[: len(answer.chain.token_ids)]) for answer in answers)
        later = sum(1 + sum(gains[: answer.row.num_draft_tokens]) for answer in answers)
        return self._pace.slowdown(max(answer.num_missing for answer in answers)) < later / now

    def _take_over(self, answers: Sequence[_Answer]) -> list[_Answer]:
        """Learn from verdicts, bring the cache up to the drafts, and return the rows that can get a draft."""
        for answer in answers:
            if answer.verdict is not None:
                context, verdict = answer.verdict
                self._predictor.learn(context, *verdict)
        if hits := [answer.branch for answer in answers if answer.branch is not None]:
            assert self._branches is not None
            self._branches.move(hits)
        for answer in answers:
            if answer.branch is not None and answer.chain.token_ids:
                # The context was computed up to the verdict, and the branch from its first token on.
                token_ids, cached = answer.row.request.token_ids, answer.branch[0].prefix.token_ids
                cached[len(token_ids) - 1 :] = [token_ids[-1], *answer.chain.token_ids[:-1]]
        current = {answer.row.request.request_id for answer in answers}
        for name in self._contexts.keys() - current:
            self.cache.trim(name)
        self.stop()
        return [answer for answer in answers if self._is_able(answer, current)]

    def _is_able(self, answer: _Answer, current: set[str]) -> bool:
        """Fit a row and its prepared draft into the cache; a row that does not fit loses its draft."""
        row = answer.row
        if not self.cache.make_room(row, answer.chain.token_ids, current):
            answer.chain.cut(0)
            return False
        self.cache.trim(row.request.request_id, len(row.request.token_ids) + row.num_draft_tokens)
        return True

    def _prepare(self, answers: Sequence[_Answer]) -> None:
        self._depth = max((answer.row.num_draft_tokens for answer in answers), default=0) or self._depth
        requests = [answer.row.request for answer in answers]
        self._contexts = {
            request.request_id: DraftContext(request, answer.chain, self.cache.prefixes[request.request_id])
            for request, answer in zip(requests, answers, strict=True)
        }
        for context in self._contexts.values():
            context.prefix.scratch = context
        self._work = self._grow(list(self._contexts.values()))

    def _grow(self, contexts: Sequence[DraftContext]) -> Work:
        width = WIDTHS[self._pace.width]
        # Branches take scratch places in free blocks.
        contexts = [
            context
            for context in contexts
            if context.length + 1 + self._depth <= self._backend.info.max_model_len
            and self.cache.reserve(context.prefix, context.length + width * self._depth)
        ]
        if not contexts:
            return
        yield from self._predict_verdicts(contexts, width)
        contexts = [context for context in contexts if context.verdicts]
        if not contexts:
            return
        branches = self._branches = Branches(contexts, width, self.cache.kv)
        requests = [context.request for context in contexts]
        for draws in self._drawer.plan(requests, branches.depths(), self._depth):
            runs = functools.partial(self._drawer.runs, requests, branches.depths(), branches.paths, branches.tips)
            yield Pass(self._drawer, branches.next_pass(), draws, runs, branches.add)

    def _predict_verdicts(self, contexts: Sequence[DraftContext], width: int) -> Work:
        requests = [context.request for context in contexts]
        drafted = [context.chain.token_ids for context in contexts]
        batch = yield from self.cache.catch_up(requests, drafted)
        depths = [[len(tokens)] for tokens in drafted]
        (draws,) = self._drawer.plan(requests, depths)
        paths = [[tokens] for tokens in drafted]
        runs = functools.partial(self._drawer.runs, requests, depths, lambda: paths)
        drawn: list[Drawn] = []

        def take(tips: Drawn) -> None:
            self.cache.hold(requests, drafted)
            drawn.append(tips)

        yield Pass(self._drawer, batch, draws, runs, take)
        (tips,) = (draw.ranking for draw in drawn)
        assert tips is not None
        self._predictor.rank(contexts, tips)
        for context in contexts:
            context.verdicts = self._predictor.predict(context, width, self._drawer.end_ids(context.request))
