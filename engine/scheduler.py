"""Scheduler: chooses the requests of the next round, and admits, preempts and finishes requests.

Continuous batching with chunked prefill under one token budget: decoding requests get their last token and their
draft first, prompts get the rest. When blocks run out, the youngest running request is preempted: it frees its blocks
and recomputes its committed tokens later.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from engine.block_pool import BlockPool, block_digest
from engine.config import EngineConfig
from engine.errors import QueueFullError
from engine.protocols import Draft, Verdict
from engine.sequence import RequestOutput, Sequence
from engine.stats import SpeculationStats

_SAME_FOR_ALL: Mapping[str, int] = {}


@dataclass(slots=True)
class ScheduledRow:
    """One request in a round: computes `length` tokens from `num_computed` on and drafts up to `num_draft_tokens`."""

    sequence: Sequence
    length: int
    num_draft_tokens: int


class Scheduler:
    """Owns the sequences and the target's block tables; committed tokens change in `commit` only."""

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size, share=config.enable_prefix_caching)
        self.stats = SpeculationStats()
        self._max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._lacks_blocks = False
        self._lengths: Mapping[str, int] = _SAME_FOR_ALL

    def add(self, sequence: Sequence) -> None:
        """Queue a request; one that has tokens already, from another engine, comes before all that have none.

        Raises:
            QueueFullError: `max_queued_requests` are waiting, and the request has no tokens.
        """
        if sequence.num_output_tokens:
            num_begun = next((i for i, s in enumerate(self.waiting) if not _has_begun(s)), len(self.waiting))
            self.waiting.insert(num_begun, sequence)
            return
        if len(self.waiting) >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the limit is {self.config.max_queued_requests}"
            )
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; `commit` ignores its row of a round in flight."""
        for queue in (self.running, self.waiting):
            for sequence in [s for s in queue if s.request.request_id == request_id]:
                queue.remove(sequence)
                self._free(sequence)

    def reset(self) -> None:
        """Move all running requests back to the queue and forget all blocks, because the target lost its KV cache."""
        for sequence in reversed(self.running):
            self._free(sequence)
            self.waiting.appendleft(sequence)
        self.running.clear()
        self.pool.clear()

    @property
    def unstarted_ids(self) -> list[str]:
        """The waiting requests of which nothing has been computed yet, oldest first."""
        return [s.request.request_id for s in self.waiting if not _has_begun(s)]

    @property
    def draft_limits(self) -> list[int]:
        """The longest draft that each decoding request may get whose draft length is not fixed."""
        return self._draft_limits(is_fixed=False)

    @property
    def fixed_draft_lengths(self) -> list[int]:
        """The draft length of each decoding request that fixes its own."""
        return self._draft_limits(is_fixed=True)

    @property
    def has_prompts(self) -> bool:
        """Whether the next round is likely to compute prompts; prompts that wait for blocks do not count."""
        is_full = len(self.running) >= self.config.max_num_seqs or self._lacks_blocks
        return (bool(self.waiting) and not is_full) or not all(s.is_decoding for s in self.running)

    def next_batch(self, num_speculative_tokens: int, lengths: Mapping[str, int] = _SAME_FOR_ALL) -> list[ScheduledRow]:
        """Choose the rows of the next round and reserve their blocks.

        Args:
            lengths: by request id, draft lengths that take the place of `num_speculative_tokens`.
        """
        self._lengths = lengths
        budget = self.config.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        # Decoding rows first, so that a long prompt does not delay them.
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
        """Commit the verdicts' tokens, publish full blocks, and remove finished requests."""
        outputs = []
        running = {id(sequence) for sequence in self.running}
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            sequence = row.sequence
            if id(sequence) not in running:
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
        # An encoder's input may exceed the budget: its pass is not part of the others' pass.
        length = max(min(sequence.num_uncomputed, budget), sequence.num_inseparable)
        if not sequence.is_decoding:
            return ScheduledRow(sequence, length, 0)
        length_limit = self._lengths.get(sequence.request.request_id, num_speculative_tokens)
        limit = self._draft_limit(sequence, length_limit)
        # A round commits one token more than it accepts, so a draft must leave room for that token.
        room = min(sequence.num_remaining - 1, self._max_model_len - len(sequence.request.token_ids) - 1, budget - 1)
        return ScheduledRow(sequence, length, max(0, min(limit, room)))

    def _draft_limits(self, *, is_fixed: bool) -> list[int]:
        longest = self.config.num_speculative_tokens
        decoding = [s for s in self.running if s.is_decoding and s.request.params.fixes_draft_length == is_fixed]
        return [self._draft_limit(sequence, longest) for sequence in decoding]

    def _draft_limit(self, sequence: Sequence, num_speculative_tokens: int) -> int:
        """Return the longest draft of a request in a round for which `num_speculative_tokens` were chosen."""
        params = sequence.request.params
        longest = self.config.num_speculative_tokens if params.fixes_draft_length else num_speculative_tokens
        return longest if params.num_speculative_tokens is None else min(params.num_speculative_tokens, longest)

    def _reserve(self, row: ScheduledRow, rows: list[ScheduledRow]) -> bool:
        """Allocate the row's blocks, preempting the youngest requests; return False if that preempts the row itself."""
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
        """Start the first waiting request and return its row, or None if there are too few free blocks."""
        if not sequence.lacks_prompt_logprobs:
            sequence.block_ids, sequence.digests = self.pool.match(sequence.request.token_ids, sequence.request.salt)
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
            self.stats.num_prompt_tokens += sequence.request.num_prompt_tokens
            self.stats.num_cached_prompt_tokens += min(sequence.num_cached, sequence.request.num_prompt_tokens)
            if self.config.enable_prefix_caching and not sequence.lacks_prompt_logprobs:
                self.stats.num_prefix_queries += len(sequence.request.token_ids)
                self.stats.num_prefix_hits += sequence.num_cached
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
        """Publish the blocks that are now full of committed, computed tokens."""
        size = self.config.block_size
        computed = min(sequence.num_computed, len(sequence.request.token_ids))
        while (len(sequence.digests) + 1) * size <= computed:
            index = len(sequence.digests)
            parent = sequence.digests[-1] if sequence.digests else sequence.request.salt
            digest = block_digest(parent, sequence.request.token_ids[index * size : (index + 1) * size])
            sequence.digests.append(digest)
            self.pool.publish(sequence.block_ids[index], digest)


def _has_begun(sequence: Sequence) -> bool:
    """Whether a request was in a batch before, here or in another engine."""
    return sequence.was_admitted or sequence.num_output_tokens > 0
