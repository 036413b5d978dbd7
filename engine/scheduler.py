"""Scheduler: chooses the requests of the next round, and admits, preempts and finishes requests.

Continuous batching with chunked prefill under one token budget: decoding requests come first, prompts get what is left.
When blocks run out, the last request of `by_share` is preempted: it frees its blocks and recomputes its committed
tokens later. A request is also preempted to start the first request of an owner that has no request running.

In alternation, a round takes half of the requests. It chooses among the requests that are not in flight, longest
waiting first, so no list of a cohort's members is needed.
"""

from engine.blocks.block_pool import BlockPool, block_digest, block_table
from engine.blocks.row_extras import RowExtras
from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.protocols import Request, ScheduledRow, Verdict
from engine.requests.output import RequestOutput
from engine.requests.sequence import Sequence
from engine.requests.waiting import WaitingQueue, by_share, dispensable
from engine.stats.drafts import SpeculationStats


class Scheduler:
    """Owns the sequences and the target's block tables; `num_cohorts` is 2 in alternation, else 1."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, max_model_len: int, extras: RowExtras | None = None
    ) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size, share=config.enable_prefix_caching)
        self.extras = extras or RowExtras()
        self.stats = SpeculationStats()
        self._max_model_len = max_model_len
        self.waiting = WaitingQueue(config.max_queued_requests)
        self.running: list[Sequence] = []
        self.num_cohorts = 1
        self._num_rounds = 0
        self._lacks_blocks = False

    def add(self, sequence: Sequence) -> None:
        """Queue a request; raises what `WaitingQueue.add` raises."""
        self.waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; `commit` ignores its row in flight."""
        for queue in (self.running, self.waiting):
            for sequence in [s for s in queue if s.request.request_id == request_id]:
                queue.remove(sequence)
                self._free(sequence)

    def reset(self) -> None:
        """Queue all running requests again, after the target lost its KV cache; drop a round in flight first."""
        while self.running:
            self._requeue(self.running[-1])
        self.pool.clear()
        self.extras.clear()

    @property
    def unstarted_ids(self) -> list[str]:
        """Waiting requests that no round has computed yet."""
        return [s.request.request_id for s in self.waiting if not s.has_begun]

    @property
    def num_decoding(self) -> int:
        """The number of running requests whose prompts are computed."""
        return sum(sequence.is_decoding for sequence in self.running)

    @property
    def decoding(self) -> list[Request]:
        """The requests of the next round that can get drafts: their prompts are computed."""
        return [s.request for s in self._cohort if s.is_decoding and not s.request.params.audits]

    @property
    def has_prompts(self) -> bool:
        """Whether the next round is likely to compute prompts; prompts that wait for blocks do not count."""
        cohort = self._cohort
        is_full = len(self.running) >= self.config.max_num_seqs or self._lacks_blocks or len(cohort) >= self._share
        if self._newcomer is not None or (self.waiting and not is_full):
            return True
        return not all(sequence.is_decoding for sequence in cohort)

    def next_batch(self, plan: Plan) -> list[ScheduledRow]:
        """Choose the rows of the next round and reserve their blocks; `commit` or `withdraw` ends the round."""
        for sequence in [s for s in reversed(self.running) if self.extras.is_unsure(s.request) and not s.is_in_flight]:
            self._requeue(sequence)
        while (newcomer := self._newcomer) is not None:
            if len(self.running) >= self.config.max_num_seqs or not self._take_cached(newcomer):
                self._preempt(dispensable(self.running)[-1])
            else:
                self._begin(newcomer)
        budget, k = self.config.max_num_batched_tokens, self.config.num_speculative_tokens
        # Memory is planned for 1 + k logits per place in a batch. Longer drafts use the logits of empty places, and
        # the part of the budget beyond 1 + k tokens for each row.
        num_empty = max(0, self.config.max_num_seqs - len(self.running) - len(self.waiting))
        longest = k + min(num_empty * (1 + k), max(0, budget - len(self.running) * (1 + k)))
        if not self.extras.drafts_beyond_plan:
            longest = k
        rows: list[ScheduledRow] = []
        # Decoding rows first, so that a long prompt does not delay them.
        cohort = sorted(self._cohort, key=lambda s: not s.is_decoding)
        if cohort and not cohort[-1].is_decoding:
            order = by_share(self.running)
            cohort.sort(key=lambda s: -1 if s.is_decoding else order.index(s))
        self._lacks_blocks = False
        for sequence in cohort:
            if budget < _fewest_tokens(sequence) or sequence not in self.running:  # preempted for an earlier row
                continue
            row = self._row(sequence, budget, plan, longest)
            if self._reserve(sequence, row, rows):
                rows.append(row)
                budget -= row.length + row.num_draft_tokens
                longest -= max(0, row.num_draft_tokens - k)
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs and len(rows) < self._share:
            first = self.waiting.first_besides({sequence.owner for sequence in self.running}) or self.waiting.first
            has_room = not self._lacks_blocks and budget >= _fewest_tokens(first)
            if not has_room or (admitted := self._admit(first, budget, plan)) is None:
                self._lacks_blocks = True
                break
            rows.append(admitted)
            budget -= admitted.length + admitted.num_draft_tokens
        self.extras.assign(rows)
        self._num_rounds += 1
        for sequence in self._running_of(rows):
            sequence.is_in_flight, sequence.last_round = True, self._num_rounds
        return rows

    def withdraw(self, batch: list[ScheduledRow]) -> None:
        """Take back a round that has no verdicts."""
        for sequence in self._running_of(batch):
            sequence.is_in_flight = False

    def commit(self, batch: list[ScheduledRow], verdicts: list[Verdict]) -> list[tuple[Sequence, RequestOutput]]:
        """Commit the verdicts' tokens and free finished requests; return outputs, which `Sequence.decode` completes."""
        outputs = []
        self.withdraw(batch)
        running = {id(sequence.request): sequence for sequence in self.running}
        for row, verdict in zip(batch, verdicts, strict=True):
            sequence = running.get(id(row.request))
            if sequence is None:
                continue
            if verdict.prompt_logprobs:
                sequence.prompt_logprobs[sequence.num_computed :] = verdict.prompt_logprobs
            sequence.num_computed += row.length + verdict.num_accepted
            if verdict.token_ids or verdict.error:
                output = sequence.commit(verdict)
                # Accepted tokens beyond the text's end are not counted; the planner learns from them nevertheless.
                params = sequence.request.params
                if not params.audits:
                    self.stats.observe_draft(output.num_draft_tokens, output.num_accepted_tokens, params.adapter)
                    self.stats.num_generation_tokens += len(output.token_ids)
                self.waiting.charge(sequence, len(output.token_ids))
                outputs.append((sequence, output))
            self._publish(sequence)
            self.extras.commit(sequence.request, sequence.digests)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self._free(sequence)
        return outputs

    @property
    def _share(self) -> int:
        """The most requests of one round; requests that wait for blocks do not count."""
        num_waiting = 0 if self._lacks_blocks else len(self.waiting)
        num_requests = min(self.config.max_num_seqs, len(self.running) + num_waiting)
        return -(-num_requests // self.num_cohorts)

    @property
    def _newcomer(self) -> Sequence | None:
        """The waiting request that a running request is preempted for, if any."""
        newcomer = self.waiting.first_besides({sequence.owner for sequence in self.running})
        return newcomer if newcomer is not None and dispensable(self.running) else None

    @property
    def _cohort(self) -> list[Sequence]:
        """The running requests of the next round."""
        idle = [sequence for sequence in self.running if not sequence.is_in_flight]
        if len(idle) > self._share:
            idle = sorted(idle, key=lambda sequence: sequence.last_round)[: self._share]
        return idle

    def _running_of(self, batch: list[ScheduledRow]) -> list[Sequence]:
        requests = {id(row.request) for row in batch}
        return [sequence for sequence in self.running if id(sequence.request) in requests]

    def _row(self, sequence: Sequence, budget: int, plan: Plan, longest: int) -> ScheduledRow:
        num_draft_tokens, request = 0, sequence.request
        num_audited = len(request.predicted_token_ids) - request.num_output_tokens if request.params.audits else 0
        length = min(sequence.num_uncomputed, budget - 1 if num_audited else budget)
        length = self.extras.row_length(request, sequence.num_computed, length)
        context = min(sequence.num_remaining, self._max_model_len - len(request.token_ids))
        if num_audited and length == sequence.num_uncomputed:
            # The pass must not draw a token that is audited; the last of these is followed by no other.
            num_draft_tokens = min(num_audited, longest, context, max(1, budget - length))
        elif sequence.is_decoding and not request.params.audits:
            # A draft must leave room for the recovered or bonus token.
            num_draft_tokens = max(0, min(plan.length_of(request), longest, min(context, budget) - 1))
        return ScheduledRow(
            request,
            num_draft_tokens,
            sequence.num_computed,
            length,
            sequence.block_ids,
            runs_ahead=plan.overlap == "ahead",
        )

    def _reserve(self, sequence: Sequence, row: ScheduledRow, batch: list[ScheduledRow]) -> bool:
        """Allocate a row's blocks, preempting other requests; return False if the row is preempted or must wait.

        While a row waits for the blocks of requests in flight, no request is admitted, as it would take them.
        """
        while not self._grow(sequence, row):
            order = by_share(self.running)
            victim = [s for s in order if not s.is_in_flight][-1]
            if victim is sequence and order[-1].is_in_flight:
                self._lacks_blocks = True
                return False
            self._preempt(victim)
            batch[:] = [earlier for earlier in batch if earlier.request is not victim.request]
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, row: ScheduledRow) -> bool:
        num_blocks = -(-(row.start + row.length + row.num_draft_tokens) // self.config.block_size)
        blocks = self.pool.allocate(max(0, num_blocks - len(sequence.block_ids)))
        if blocks is None:
            return False
        sequence.block_ids.extend(blocks)
        return True

    def _admit(self, sequence: Sequence, budget: int, plan: Plan) -> ScheduledRow | None:
        if not self._take_cached(sequence):
            return None
        row = self._row(sequence, budget, plan, self.config.num_speculative_tokens)
        if not self._grow(sequence, row):
            self._free(sequence)
            return None
        self._begin(sequence)
        return row

    def _take_cached(self, sequence: Sequence) -> bool:
        """Give a waiting request its cached blocks; return False if no slot is free."""
        if not sequence.lacks_prompt_logprobs:
            blocks, sequence.digests = self.pool.match(sequence.request.token_ids, sequence.request.salt)
            sequence.block_ids = block_table(blocks)
        num_blocks = self.extras.admit(sequence.request, sequence.digests)
        if num_blocks is None:
            self._free(sequence)
            return False
        self.pool.free(sequence.block_ids[num_blocks:])
        del sequence.block_ids[num_blocks:], sequence.digests[num_blocks:]
        sequence.num_computed = num_blocks * self.config.block_size
        return True

    def _begin(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = sequence.num_computed
            self.waiting.charge(sequence, sequence.num_uncomputed)
            self.stats.num_prompt_tokens += sequence.request.num_prompt_tokens
            self.stats.num_cached_prompt_tokens += min(sequence.num_cached, sequence.request.num_prompt_tokens)
            if self.config.enable_prefix_caching and not sequence.lacks_prompt_logprobs:
                self.stats.num_prefix_queries += len(sequence.request.token_ids)
                self.stats.num_prefix_hits += sequence.num_cached

    def _preempt(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        self.stats.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.is_in_flight = False
        self.waiting.put_back(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        self.extras.release(sequence.request)
        sequence.block_ids, sequence.digests, sequence.num_computed = block_table(), [], 0

    def _publish(self, sequence: Sequence) -> None:
        size, token_ids = self.config.block_size, sequence.request.token_ids
        for index in range(len(sequence.digests), min(sequence.num_computed, len(token_ids)) // size):
            parent = sequence.digests[-1] if sequence.digests else sequence.request.salt
            sequence.digests.append(block_digest(parent, token_ids[index * size : (index + 1) * size]))
            self.pool.publish(sequence.block_ids[index], sequence.digests[-1])


def _fewest_tokens(sequence: Sequence) -> int:
    """Return the fewest tokens of a row: where a request audits a text, it must have one of these, too."""
    return 2 if sequence.request.params.audits else 1
