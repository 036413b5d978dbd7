"""Scheduler: which requests share the next round, who waits, who is preempted, who is finished.

Continuous batching with chunked prefill under one token budget: every running request gets its tip and its
draft, what is left goes to prompts. When blocks run out, the youngest running request gives up its own and
computes them again later: nothing that was committed is lost.
"""

from collections import deque
from dataclasses import dataclass

from engine.block_pool import BlockPool, block_digest
from engine.config import EngineConfig
from engine.errors import QueueFullError
from engine.protocols import Draft, Verdict
from engine.sequence import RequestOutput, Sequence
from engine.stats import SpeculationStats


@dataclass(slots=True)
class ScheduledRow:
    """One request's part of a round: tokens to compute from `num_computed` on, and the longest draft it may get."""

    sequence: Sequence
    length: int
    num_draft_tokens: int


class Scheduler:
    """Owns the sequences and the target's block tables; `commit` is the one place where committed tokens change."""

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size, share=config.enable_prefix_caching)
        self.stats = SpeculationStats()
        self._max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._lacks_blocks = False

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            QueueFullError: max_queued_requests already wait.
        """
        if len(self.waiting) >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the limit is {self.config.max_queued_requests}"
            )
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; a round in flight ignores it when it comes back."""
        for queue in (self.running, self.waiting):
            for sequence in [s for s in queue if s.request.request_id == request_id]:
                queue.remove(sequence)
                self._free(sequence)

    def reset(self) -> None:
        """Send every running request back to waiting: the memory behind the blocks is gone, the tokens are not."""
        for sequence in reversed(self.running):
            self._free(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.pool.clear()

    @property
    def draft_limits(self) -> list[int]:
        """The longest draft that each decoding request may get, by the configuration and its own parameters."""
        return [self._most_draft_tokens(s, self.config.num_speculative_tokens) for s in self.running if s.is_decoding]

    @property
    def has_prompts(self) -> bool:
        """Whether the next round is likely to compute prompts; those that wait for blocks may wait for long."""
        is_full = len(self.running) >= self.config.max_num_seqs or self._lacks_blocks
        return (bool(self.waiting) and not is_full) or not all(s.is_decoding for s in self.running)

    def next_batch(self, num_speculative_tokens: int) -> list[ScheduledRow]:
        """Choose the rows of the next round and reserve their blocks."""
        budget = self.config.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        # Decoding rows first: a long prompt delays nobody's next token.
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):
            if budget <= 0:
                break
            if sequence not in self.running:
                continue
            row = self._row(sequence, budget, num_speculative_tokens)
            if self._reserve(row, rows):
                rows.append(row)
                budget -= row.length + row.num_draft_tokens
        self._lacks_blocks = False
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            admitted = self._admit(self.waiting[0], budget, num_speculative_tokens)
            if admitted is None:
                self._lacks_blocks = True
                break
            rows.append(admitted)
            budget -= admitted.length + admitted.num_draft_tokens
        return rows

    def commit(self, rows: list[ScheduledRow], drafts: list[Draft], verdicts: list[Verdict]) -> list[RequestOutput]:
        """Append what was decided, name the blocks that are full now, and let finished requests go."""
        outputs = []
        alive = {id(sequence) for sequence in self.running}
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            sequence = row.sequence
            if id(sequence) not in alive:
                continue
            if verdict.prompt_logprobs:
                sequence.prompt_logprobs[sequence.num_computed :] = verdict.prompt_logprobs
            sequence.num_computed += row.length + verdict.num_accepted
            if verdict.token_ids:
                self.stats.observe_draft(len(draft.token_ids), verdict.num_accepted)
                output = sequence.commit(verdict, len(draft.token_ids))
                self.stats.num_generation_tokens += len(output.token_ids)
                outputs.append(output)
            self._publish(sequence)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self._free(sequence)
        return outputs

    def _row(self, sequence: Sequence, budget: int, num_speculative_tokens: int) -> ScheduledRow:
        length = min(sequence.num_uncomputed, budget)
        if not sequence.is_decoding:
            return ScheduledRow(sequence, length, 0)
        wanted = self._most_draft_tokens(sequence, num_speculative_tokens)
        # The round commits one token beyond the draft, so the last token allowed is never drafted.
        room = min(sequence.num_remaining - 1, self._max_model_len - len(sequence.request.token_ids) - 1, budget - 1)
        return ScheduledRow(sequence, length, max(0, min(wanted, room)))

    @staticmethod
    def _most_draft_tokens(sequence: Sequence, num_speculative_tokens: int) -> int:
        asked = sequence.request.params.num_speculative_tokens
        return num_speculative_tokens if asked is None else min(asked, num_speculative_tokens)

    def _reserve(self, row: ScheduledRow, rows: list[ScheduledRow]) -> bool:
        """Give the row its blocks, preempting the youngest others; False if it was preempted itself."""
        sequence = row.sequence
        while not self._grow(sequence, sequence.num_computed + row.length + row.num_draft_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            rows[:] = [other for other in rows if other.sequence is not victim]
            if victim is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self.pool.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        sequence.block_ids += blocks
        return True

    def _admit(self, sequence: Sequence, budget: int, num_speculative_tokens: int) -> ScheduledRow | None:
        """Move the first waiting request to running, or leave it where it is when its blocks are not there."""
        if not sequence.lacks_prompt_logprobs:
            sequence.block_ids, sequence.digests = self.pool.match(sequence.request.token_ids, sequence.salt)
        sequence.num_computed = len(sequence.block_ids) * self.config.block_size
        row = self._row(sequence, budget, num_speculative_tokens)
        if not self._grow(sequence, sequence.num_computed + row.length + row.num_draft_tokens):
            self._free(sequence)
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.num_cached = sequence.num_computed
            self.stats.num_prompt_tokens += sequence.request.prompt_length
        return row

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.stats.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        sequence.block_ids, sequence.digests, sequence.num_computed = [], [], 0

    def _publish(self, sequence: Sequence) -> None:
        """Name the sequence's blocks that became full of committed, computed tokens."""
        size = self.config.block_size
        computed = min(sequence.num_computed, len(sequence.request.token_ids))
        while (len(sequence.digests) + 1) * size <= computed:
            nth = len(sequence.digests)
            parent = sequence.digests[-1] if sequence.digests else sequence.salt
            digest = block_digest(parent, sequence.request.token_ids[nth * size : (nth + 1) * size])
            sequence.digests.append(digest)
            self.pool.publish(sequence.block_ids[nth], digest)
