"""Engine: `add`, `abort` and `step`; a step runs one round: propose, verify, commit."""

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any

from engine.blocks.block_pool import salt_digest
from engine.blocks.row_extras import make_row_extras
from engine.config import EngineConfig, ModelInfo
from engine.control.plan import Plan, RoundSeconds
from engine.control.planner import Planner
from engine.drafting.check import check_drafts
from engine.drafting.registry import num_tree_chains
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Drafter, Overlap, Request, ScheduledRow, Verifier, VerifyRow, chain
from engine.requests.detokenizer import Detokenizer
from engine.requests.limits import RequestLimits
from engine.requests.output import RequestOutput
from engine.requests.sequence import Sequence
from engine.rounds import Rounds, Verify
from engine.scheduler import Scheduler
from engine.stats.requests import RequestStats


@dataclass(slots=True)
class _Committed:
    """A finished round, and its outputs that `take_outputs` has not returned yet."""

    batch: list[ScheduledRow]
    outputs: list[tuple[Sequence, RequestOutput]]
    started_s: float
    ended_s: float


class Engine:
    """Runs requests with a drafter and a verifier, wherever these two compute.

    Args:
        target: the loaded target. If it has a start token, the prompt is an encoder's input, and the start token
            begins the text. The cache of an input token depends on the whole input, so prefix caching is then off.
        num_blocks: the target's KV blocks, including block 0, which no request gets.
        tokenizer: a transformers fast tokenizer; None leaves `RequestOutput.text` empty.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: ModelInfo,
        *,
        drafter: Drafter,
        verifier: Verifier,
        num_blocks: int,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        overlaps: Collection[Overlap] = (),
    ) -> None:
        self._start_ids = [] if target.start_id is None else [target.start_id]
        self.config = config = replace(config, enable_prefix_caching=False) if self._start_ids else config
        self.drafter = drafter
        self.verifier = verifier
        self.vocab_size = target.vocab_size
        self._eos = frozenset(target.eos_token_ids)
        self._tokenizer = None if tokenizer is None else getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._limits = RequestLimits(config, target, num_blocks)
        self.max_model_len = self._limits.max_model_len
        longest = self.max_model_len + len(self._start_ids)
        self.scheduler = Scheduler(config, num_blocks, longest, make_row_extras(config, target))
        self.stats = self.scheduler.stats
        self.planner = Planner(config, num_tree_chains(config), drafter, overlaps)
        self.request_stats = RequestStats(self.max_model_len)
        self._clock = clock
        self._round_ended: float | None = None
        self._rounds = Rounds(self._round)
        self._committed: list[_Committed] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting, or a round is in flight."""
        return self.num_requests > 0 or self._rounds.is_in_flight

    @property
    def num_requests(self) -> int:
        """Running and waiting requests."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        output_token_ids: Ids[int] = (),
        predicted_token_ids: Ids[int] = (),
        priority: int = 0,
        owner: str = "",
    ) -> None:
        """Queue a request; it shares cached prefixes only with requests of the same `cache_salt`.

        Args:
            output_token_ids: tokens that another engine committed for this request. With the same seed and the coupled
                rule, the text continues as it would have there; else it has the same distribution.
            predicted_token_ids: the output that the client predicts, to draft from; it does not change the text. With
                `params.audits`, the text to audit.
            priority: a lower priority starts earlier, and is preempted later.
            owner: owners share the engine's tokens equally; see `WaitingQueue`.

        Raises:
            RequestError: this model cannot serve the prompt or a parameter, or the output has ended.
            QueueFullError: the queue is full; a request with output is never refused.
        """
        params = self._limits.fit(prompt_token_ids, params, is_new=not output_token_ids)
        self._limits.check_ids("prediction", predicted_token_ids)
        if params.audits:
            self._limits.check_audit()
        tokens = [*prompt_token_ids, *self._start_ids]
        input_length = len(prompt_token_ids) if self._start_ids else 0
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(
                self._tokenizer,
                tokens[input_length:],
                stop=params.stop,
                skip_special=params.skip_special_tokens,
                marks=params.mark_token_ids,
            )
        elif params.stop:
            raise RequestError("stop strings need a tokenizer; this engine has none", "stop")
        sequence = Sequence(
            Request(
                request_id,
                tokens,
                len(tokens),
                params,
                salt_digest(cache_salt, params.adapter),
                input_length,
                predicted_token_ids,
            ),
            end_ids=frozenset() if params.ignore_eos else self._eos,
            detokenizer=detokenizer,
            priority=priority,
            owner=owner,
        )
        sequence.resume(list(output_token_ids))
        self.scheduler.add(sequence)
        self.request_stats.add(request_id, self._clock())

    def abort(self, request_id: str) -> None:
        """Drop a request, its blocks and its outputs; unknown ids are ignored."""
        self.scheduler.abort(request_id)
        self._release(request_id)
        self.request_stats.release(request_id)
        for done in self._committed:
            done.outputs = [entry for entry in done.outputs if entry[1].request_id != request_id]
        if not self.has_work:
            self._round_ended = None

    def reset(self) -> None:
        """Recompute all running requests from their committed tokens, after the target lost its KV cache."""
        self._rounds.drop()
        self.scheduler.reset()
        self._round_ended = None

    async def step(self) -> list[RequestOutput]:
        """Run one round and return its outputs; raises what `run_round` raises."""
        await self.run_round()
        return self.take_outputs()

    async def run_round(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Run one round, and return whether it computed prompts; `take_outputs` returns its outputs.

        Args:
            meanwhile: called once, while the target computes or just before.

        Raises:
            TargetError: the round failed and committed nothing; call `reset` and step again.
            DrafterError: the drafter proposed an invalid draft; nothing was computed.
        """
        num_cohorts = self.planner.choose_cohorts(self.scheduler.num_decoding)
        self.scheduler.num_cohorts = num_cohorts
        return await self._rounds.run(self.verifier.verify, meanwhile, num_cohorts)

    async def _round(self, verify: Verify, meanwhile: Callable[[], object]) -> bool:
        # Time between rounds counts towards the later round, unless the engine was idle.
        started_s = self._clock() if self._round_ended is None else self._round_ended
        plan = self.planner.plan(self.scheduler.decoding, has_prompts=self.scheduler.has_prompts)
        batch = self.scheduler.next_batch(plan)
        planned_s = self._clock()
        try:
            drafts = await self._propose(plan, batch)
            proposed_s = self._clock()
            meanwhile()
            batch, rows = self._present(batch, drafts)
            if not rows:
                return False
            sent_s = self._clock()
            verdicts = await verify(rows)
        except BaseException:
            self.scheduler.withdraw(batch)
            raise
        outputs = self.scheduler.commit(batch, verdicts)
        ended_s, before_s = self._clock(), self._round_ended or 0.0
        started_s = max(started_s, before_s)
        seconds = RoundSeconds(ended_s - started_s, proposed_s - planned_s, ended_s - max(sent_s, before_s))
        self.planner.observe(plan, batch, verdicts, seconds)
        self.stats.num_rounds_by_length[plan.longest, plan.reason] += 1
        self._committed.append(_Committed(batch, outputs, started_s, ended_s))
        for sequence, _ in outputs:
            if sequence.finish_reason is not None:
                self._release(sequence.request.request_id)
        self._round_ended = ended_s if self.has_work else None
        return any(row.start < row.request.prompt_length for row in batch)

    def take_outputs(self) -> list[RequestOutput]:
        """Detokenize, count and return the outputs since the last call; the next round may compute meanwhile."""
        rounds, self._committed = self._committed, []
        for done in rounds:
            outputs = [output for _, output in done.outputs]
            for sequence, output in done.outputs:
                sequence.decode(output)
            self.request_stats.observe(done.batch, outputs, started_s=done.started_s, ended_s=done.ended_s)
            for output in outputs:
                if output.finish_reason is not None:
                    self.request_stats.release(output.request_id)
        return [output for done in rounds for _, output in done.outputs]

    async def _propose(self, plan: Plan, batch: list[ScheduledRow]) -> list[Draft]:
        # Rows in prefill are included: their prompts let a drafter with run-ahead prepare the first draft.
        drafts = {id(row): _audited(row) for row in batch if row.request.params.audits}
        speculating = [row for row in batch if id(row) not in drafts and plan.length_of(row.request) > 0]
        for row in speculating:
            row.draft_index = self.planner.survival.choose_draft(row.request)
        if speculating:
            try:
                proposed = await self.drafter.propose(speculating)
                check_drafts(proposed, speculating, self.vocab_size)
            except BaseException:
                for row in batch:  # the drafter's state of these requests is unknown
                    self.drafter.release(row.request.request_id)
                raise
            drafts |= {id(row): draft for row, draft in zip(speculating, proposed, strict=True)}
        return [drafts.get(id(row), NO_DRAFT) for row in batch]

    def _present(self, batch: list[ScheduledRow], drafts: list[Draft]) -> tuple[list[ScheduledRow], list[VerifyRow]]:
        """Drop the rows of requests aborted while the drafter proposed: their blocks are freed."""
        running = {id(sequence.request) for sequence in self.scheduler.running}
        drafted = [(row, draft) for row, draft in zip(batch, drafts, strict=True) if id(row.request) in running]
        return [row for row, _ in drafted], [row.verify(draft) for row, draft in drafted]

    def _release(self, request_id: str) -> None:
        self.drafter.release(request_id)
        self.verifier.release(request_id)


def _audited(row: ScheduledRow) -> Draft:
    """Return the next tokens of the text that a request audits, as a draft."""
    start = row.request.num_output_tokens
    return chain(list(row.request.predicted_token_ids[start : start + row.num_draft_tokens]))
