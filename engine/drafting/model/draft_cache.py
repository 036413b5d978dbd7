"""DraftCache: a draft model's KV cache, and the prefix of each request that it holds.

Each proposal brings the committed tokens. The cache keeps the common prefix of these and its own tokens, and the
drafter computes the others. So rejected drafts, unknown requests and evictions are the same case. If a request has a
slot, the slot advances with committed tokens only; later tokens are computed again for each proposal.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from engine.blocks.block_pool import BlockTable, block_table
from engine.config import EngineConfig
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, build
from engine.execution.forward_row import ForwardRow
from engine.execution.kv_tensors import KVTensors
from engine.protocols import ProposeRow, Request, SlotRow

MAX_TAIL = 8
"""The most tokens that a row can compute in the pass of its last token."""


@dataclass(slots=True)
class CachedPrefix:
    """The tokens of one request whose keys and values are cached, and the blocks that hold them."""

    token_ids: list[int] = field(default_factory=list)
    block_ids: BlockTable = field(default_factory=block_table)
    num_committed: int = 0  # tokens that were committed at the last comparison; they never change
    input_length: int = 0  # see `Request`; an input's tokens are cached together
    slot: int = 0  # stands for the first `num_in_slot` tokens; 0 in a cache without slots
    num_in_slot: int = 0
    num_features: int = 0  # places from the first on that hold the target's features
    scratch: object = None  # the draft or branches whose entries lie behind the tokens; None if overwritten


class Text(NamedTuple):
    """A request's committed tokens and draft tokens, held without a copy."""

    committed: Sequence[int]
    drafted: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.committed) + len(self.drafted)

    def slice(self, start: int, end: int) -> list[int]:
        base = len(self.committed)
        return [*self.committed[start:end], *self.drafted[max(start - base, 0) : max(end - base, 0)]]


class DraftCache:
    """The draft's keys and values, with a block table per request; least recently used requests are evicted."""

    def __init__(self, backend: Backend, config: EngineConfig, kv: KVTensors | None = None) -> None:
        """Allocate the cache, unless `kv` is a cache whose blocks others give to requests."""
        assert config.num_blocks is not None
        num_slots = 1 + (config.num_states or config.max_num_seqs)
        self.kv = kv or backend.allocate_kv(config.num_blocks + 1, config.block_size, num_slots)
        self._free_slots = list(range(1, self.kv.extras.num_slots))
        self.free_blocks = [] if kv else list(range(1, config.num_blocks + 1))  # padding writes to block 0
        self.prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self.backend = backend
        self.forget: Callable[[str], None] = self.release
        """Called with the request to evict; frees its blocks."""
        self.choose_victim: Callable[[Sequence[str]], str] = itemgetter(0)
        """Chooses the request to evict among names, the least recently used first."""
        self._chunk = config.max_num_batched_tokens
        self._max_tail = MAX_TAIL

    def restart(self) -> None:
        """Forget all keys and values, because they are of former weights."""
        for request_id in list(self.prefixes):
            self.forget(request_id)

    def release(self, request_id: str) -> None:
        if (prefix := self.prefixes.pop(request_id, None)) is not None:
            self.free_blocks += prefix.block_ids
            if prefix.slot:
                self._free_slots.append(prefix.slot)

    def make_room(self, row: ProposeRow, drafted: Sequence[int], current: Container[str]) -> bool:
        """Cut a row's cached prefix to its common prefix with the text, and reserve blocks for its draft.

        Returns False if the text does not fit the context or the cache, or has a token that the draft does not know.
        `drafted` are draft tokens already drawn; `current` requests are not evicted.
        """
        request, info = row.request, self.backend.info
        length = len(request.token_ids) + row.num_draft_tokens
        if length > info.max_model_len:
            return False
        prefix = self.prefixes.setdefault(request.request_id, CachedPrefix(input_length=request.input_length))
        self.prefixes.move_to_end(request.request_id)
        prefix.scratch = None
        text = Text(request.token_ids, drafted)
        length_kept = common_length(prefix, text)
        if self.kv.extras.num_slots:
            length_kept = prefix.num_in_slot = prefix.num_in_slot if prefix.num_in_slot <= length_kept else 0
        del prefix.token_ids[length_kept:]
        if max(text.slice(len(prefix.token_ids), text.length)) >= info.vocab_size:
            return False
        while not self.reserve(prefix, length):
            if not self.evict(current):
                return False
        return True

    def evict(self, current: Container[str]) -> bool:
        """Free the blocks of a request that is not current; return False if there is none."""
        names = [name for name in self.prefixes if name not in current]
        if names:
            self.forget(self.choose_victim(names))
        return bool(names)

    def reserve(self, prefix: CachedPrefix, length: int) -> bool:
        """Give a prefix blocks for `length` tokens, and a slot; return False if too few are free."""
        if self.kv.extras.num_slots and not prefix.slot:
            if not self._free_slots:
                return False
            prefix.slot = self._free_slots.pop()
        missing = max(self._blocks_for(length) - len(prefix.block_ids), 0)
        if missing > len(self.free_blocks):
            return False
        prefix.block_ids.extend([self.free_blocks.pop() for _ in range(missing)])
        return True

    def trim(self, request_id: str, length: int | None = None) -> None:
        """Free a request's blocks beyond `length` tokens, by default beyond its cached prefix."""
        prefix = self.prefixes[request_id]
        prefix.scratch = None
        kept = self._blocks_for(len(prefix.token_ids) if length is None else length)
        self.free_blocks += prefix.block_ids[kept:]
        del prefix.block_ids[kept:]

    def catch_up(
        self, requests: Sequence[Request], drafted: Iterable[Sequence[int]] = itertools.repeat(())
    ) -> Generator[None, None, ForwardBatch]:
        """Compute all but the last committed and `drafted` token of every request, yielding after every pass.

        Returns the pass that remains, with a row of logits per request. `hold` counts its tokens as cached.
        """
        prefixes, texts = self._texts(requests, drafted)
        while self._compute_chunk(prefixes, texts):
            yield
        tips = [_row(text, prefix, text.length, num_logits=1) for text, prefix in zip(texts, prefixes, strict=True)]
        return build(tips, self.kv, carries=True)

    def hold(self, requests: Sequence[Request], drafted: Iterable[Sequence[int]] = itertools.repeat(())) -> None:
        """Count committed and `drafted` tokens as cached, once the passes that compute them are launched."""
        for prefix, text in zip(*self._texts(requests, drafted), strict=True):
            prefix.token_ids += text.slice(len(prefix.token_ids), text.length)

    def compute_chunk(self, requests: Sequence[Request]) -> bool:
        """Compute one pass of `catch_up`; return False if only its last pass was left."""
        return self._compute_chunk(*self._texts(requests, itertools.repeat(())))

    def _texts(
        self, requests: Sequence[Request], drafted: Iterable[Sequence[int]]
    ) -> tuple[list[CachedPrefix], list[Text]]:
        texts = [Text(request.token_ids, tokens) for request, tokens in zip(requests, drafted, strict=False)]
        return [self.prefixes[request.request_id] for request in requests], texts

    def _compute_chunk(self, prefixes: Sequence[CachedPrefix], texts: Sequence[Text]) -> bool:
        room = self._chunk
        chunks = []
        for text, prefix in zip(texts, prefixes, strict=True):
            start = len(prefix.token_ids)
            count = min(text.length - start - 1, room)
            # An input is computed all at once, so it waits for a pass that has room for it.
            if count > self._max_tail and start + count >= prefix.input_length:
                chunks.append((prefix, _row(text, prefix, start + count)))
                room -= count
        if chunks:
            self.backend.run(build([row for _, row in chunks], self.kv))
        for prefix, row in chunks:
            prefix.token_ids += row.token_ids
            prefix.num_in_slot = len(prefix.token_ids)
        return bool(chunks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.kv.block_size)


def common_length(prefix: CachedPrefix, text: Text) -> int:
    """Return how many first tokens of a text a prefix holds; committed tokens are compared only once.

    The text's last token never counts: it is computed again for its logits.
    """
    length = min(len(prefix.token_ids), text.length - 1)
    first = min(prefix.num_committed, length)
    pairs = zip(prefix.token_ids[first:length], text.slice(first, length), strict=True)
    same = next((i for i, (known, token) in enumerate(pairs, first) if known != token), length)
    prefix.num_committed = min(same, len(text.committed))
    return same


def _row(text: Text, prefix: CachedPrefix, end: int, num_logits: int = 0) -> ForwardRow:
    start = len(prefix.token_ids)
    return ForwardRow(
        text.slice(start, end),
        start,
        prefix.block_ids,
        num_logits,
        input_length=prefix.input_length,
        prompt_length=0 if num_logits else end,
        slot=SlotRow(prefix.slot, prefix.slot if prefix.num_in_slot else 0) if prefix.slot else None,
    )
