"""ModelDrafter: a small model drafts a chain for every request of a batch, k forward passes for k tokens.

It keeps the keys and values of the prefixes it has seen, as a cache: each proposal brings the committed tokens,
the drafter keeps the longest common prefix of them and what it holds, and computes the rest. A rejected draft
token, a request it never saw and a request it forgot are the same case.
"""

from collections import OrderedDict
from collections.abc import Container, Generator, Sequence

import torch

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.drafting.cached_prefix import CachedPrefix, Text, common_length
from engine.drafting.chain import Chain
from engine.drafting.token_drawer import TokenDrawer
from engine.execution.backend import Backend
from engine.execution.batch import ForwardBatch, ForwardRow, build
from engine.protocols import NO_DRAFT, Draft, ProposeRow
from engine.sampling.grammar import Grammars


class ModelDrafter(TokenDrawer):
    """Drafts with a model in this process."""

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        token_limit: int | None = None,
        ranks: bool = False,
        grammars: Grammars | None = None,
    ) -> None:
        """Make the draft's KV cache; see `TokenDrawer`.

        Args:
            config: with its `num_blocks` planned.
        """
        assert config.num_blocks is not None
        num_blocks = config.num_blocks + 1
        kv = backend.allocate_kv(num_blocks, config.block_size)
        super().__init__(backend, kv, config, token_limit=token_limit, ranks=ranks, grammars=grammars)
        self._pool = BlockPool(num_blocks, config.block_size, share=False)
        self._chunk = config.max_num_batched_tokens
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a chain per row; it is empty if none is requested, the context is full or the cache has no room."""
        with torch.inference_mode():
            return self._propose(rows)

    def release(self, request_id: str) -> None:
        """Free a request's blocks."""
        if (prefix := self._prefixes.pop(request_id, None)) is not None:
            self._pool.free(prefix.block_ids)
        if self._grammars is not None:
            self._grammars.release(request_id)

    def _propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        current = {row.request.request_id for row in rows}
        able = [i for i, row in enumerate(rows) if row.num_draft_tokens and self._make_room(row, [], current)]
        if able:
            chains = [Chain() for _ in able]
            self._draft([rows[i] for i in able], chains)
            for i, drawn in zip(able, chains, strict=True):
                drafts[i] = drawn.draft()
        return drafts

    def _make_room(self, row: ProposeRow, drafted: Sequence[int], current: Container[str]) -> bool:
        """Cut a row's cached prefix to what its text still begins with, and reserve blocks for its draft.

        Args:
            drafted: the draft tokens already drawn after the committed ones.
            current: requests whose prefixes may not be evicted for this one.

        Returns:
            Whether the row can get a draft: it fits the context and the cache, and the draft knows all of its tokens.
        """
        request = row.request
        length = len(request.token_ids) + row.num_draft_tokens
        if length > self.backend.info.max_model_len:
            return False
        new = CachedPrefix(encoder_length=request.encoder_length)
        prefix = self._prefixes.setdefault(request.request_id, new)
        self._prefixes.move_to_end(request.request_id)
        text = Text(request.token_ids, drafted)
        del prefix.token_ids[common_length(prefix, text) :]
        if max(text.part(len(prefix.token_ids), text.length)) >= self.backend.info.vocab_size:
            return False
        missing = self._pool.blocks_for(length) - len(prefix.block_ids)
        blocks = self._pool.allocate(max(missing, 0))
        while blocks is None:
            victim = next((name for name in self._prefixes if name not in current), None)
            if victim is None:
                return False
            self.release(victim)
            blocks = self._pool.allocate(missing)
        prefix.block_ids += blocks
        return True

    def _trim(self, request_id: str, length: int) -> None:
        """Free a request's blocks beyond `length` tokens."""
        prefix = self._prefixes[request_id]
        kept = self._pool.blocks_for(length)
        self._pool.free(prefix.block_ids[kept:])
        del prefix.block_ids[kept:]

    def _draft(self, rows: Sequence[ProposeRow], chains: Sequence[Chain]) -> None:
        """Draw until every row's chain has `num_draft_tokens` tokens; at least one is missing in each."""
        requests = [row.request for row in rows]
        prefixes = [self._prefixes[request.request_id] for request in requests]
        heads = [len(chain.token_ids) for chain in chains]
        texts = [
            Text(request.token_ids, list(chain.token_ids)) for request, chain in zip(requests, chains, strict=True)
        ]
        counts = [row.num_draft_tokens - head for row, head in zip(rows, heads, strict=True)]
        batch = finish(self._catch_up(texts, prefixes))
        self._extend(batch, requests, [prefix.block_ids for prefix in prefixes], chains, counts)
        for text, prefix, chain, head, count in zip(texts, prefixes, chains, heads, counts, strict=True):
            # The last draft token is not computed yet, and tokens drawn beyond a row's own draft may have no block.
            prefix.token_ids += text.part(len(prefix.token_ids), text.length)
            prefix.token_ids += chain.token_ids[head : head + count - 1]

    def _catch_up(self, texts: Sequence[Text], prefixes: Sequence[CachedPrefix]) -> Generator[None, None, ForwardBatch]:
        """Compute all but the last tokens of every row, yielding after every pass.

        Returns:
            The pass that remains: the last tokens of all rows, with a row of logits for each.
        """
        while True:
            room = self._chunk
            chunks = []
            for text, prefix in zip(texts, prefixes, strict=True):
                start = len(prefix.token_ids)
                count = min(text.length - start - 1, room)
                # An encoder's input is computed all at once, so it waits for a pass that has room for it.
                if count > MAX_TAIL and start + count >= prefix.encoder_length:
                    chunks.append((prefix, _row(text, prefix, start + count)))
                    room -= count
            if not chunks:
                break
            self.backend.run(build([row for _, row in chunks], self._kv))
            for prefix, row in chunks:
                prefix.token_ids += row.token_ids
            yield
        tips = [_row(text, prefix, text.length, num_logits=1) for text, prefix in zip(texts, prefixes, strict=True)]
        return build(tips, self._kv)


def _row(text: Text, prefix: CachedPrefix, end: int, num_logits: int = 0) -> ForwardRow:
    """Return the row that computes a text from the end of its cached prefix to before `end`."""
    start = len(prefix.token_ids)
    tokens, encoder_length = text.part(start, end), prefix.encoder_length
    return ForwardRow(tokens, start, prefix.block_ids, num_logits, encoder_length=encoder_length)


MAX_TAIL = 8
"""Rows that lag by at most this many tokens compute them in the pass of their last token."""


def finish(work: Generator[None, None, ForwardBatch]) -> ForwardBatch:
    """Run work that yields between passes to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: ForwardBatch = end.value
            return result
