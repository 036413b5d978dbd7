"""A target's state slots, simulated: each holds the tokens that its state stands for, so that any slip is seen."""

import math
from dataclasses import replace

from engine.blocks.block_pool import block_digest

LOST = (b"", (-1,))
"""A state of a context that no request has."""


class StateMemory:
    """What a pass does to the slots, and what it may rely on: nothing but its rows."""

    def __init__(self, scheduler):
        config = scheduler.config
        self.states, self.block_size, self.chunk = scheduler.extras, config.block_size, scheduler.extras._chunk
        self.k = config.num_speculative_tokens
        self.num_hits = 0
        self.lose()

    def lose(self):
        self.slots = dict.fromkeys(range(1, self.states.num_blocks + 1), (*LOST, ()))

    def check(self, rows):
        """Check that each row starts from the state of its context, and writes to no slot that another one uses."""
        written = [slot for row in rows for slot in (row.slot.slot, *(slot for _, slot in row.slot.saves))]
        assert len(written) == len(set(written)), "two states are written to one slot"
        assert set(written) <= self.slots.keys()
        for row in rows:
            slot, source, num_folded, saves = row.slot
            tokens, end, prompt_length = row.request.token_ids, row.start + row.length, row.request.prompt_length
            place = row.start - num_folded
            assert len(row.draft.token_ids) + row.draft.num_deferred <= self.k
            if source == 0:
                assert place == 0, "it starts from nothing in the middle of a text"
            else:
                assert source == slot or source not in written, "another row writes to its source"
                salt, context, updates = self.slots[source]
                assert (salt, list(context)) == (row.request.salt, tokens[:place]), "the state of another context"
                assert list(updates[:num_folded]) == tokens[place : row.start], "updates of rejected tokens"
                assert source == slot or num_folded == 0
                self.num_hits += source != slot
            if row.start < prompt_length:
                assert row.start % self.chunk == 0, "a chunk starts elsewhere than without a token budget"
                assert end >= prompt_length or end % self.chunk == 0
            for boundary, _ in saves:
                assert boundary % math.lcm(self.block_size, self.chunk) == 0
                assert place < boundary <= end, "the pass does not compute this state"

    def write(self, rows, verdicts):
        for row, verdict in zip(rows, verdicts, strict=True):
            salt, tokens = row.request.salt, row.request.token_ids
            accepted = tuple(verdict.draft.token_ids[node] for node in verdict.path)
            self.slots[row.slot.slot] = salt, tuple(tokens[: row.start + row.length]), accepted
            for place, slot in row.slot.saves:
                self.slots[slot] = salt, tuple(tokens[:place]), ()

    def check_cached(self):
        """Check that each cached state stands for the tokens of the digest that it is found by."""
        for digest, slot in self.states._block_of.items():
            parent, context, _ = self.slots[slot]
            for start in range(0, len(context), self.block_size):
                parent = block_digest(parent, context[start : start + self.block_size])
            assert parent == digest

    def check_owned(self, scheduler):
        """Check that each slot is free or held as often as it says, by running requests only."""
        held = self.states._held
        assert held.keys() == {id(sequence.request) for sequence in scheduler.running}
        owned = [slot for one in held.values() for slot in (one.slot, *one.borrowed)]
        assert self.states._references == [owned.count(slot) for slot in range(self.states.num_blocks + 1)]
        assert self.states.num_free == self.states.num_blocks - len(set(owned))


class StateVerifier:
    """Passes rounds on, and simulates the states."""

    def __init__(self, scheduler, verifier):
        self.verifier, self.memory = verifier, StateMemory(scheduler)

    async def verify(self, rows):
        self.memory.check_cached()
        self.memory.check(rows)
        verdicts = await self.verifier.verify([replace(row, slot=None) for row in rows])
        self.memory.write(rows, verdicts)
        return verdicts

    def release(self, request_id):
        self.verifier.release(request_id)
