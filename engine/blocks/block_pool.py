"""BlockPool: allocates KV blocks by id and shares the blocks of equal prefixes. BlockTable: a request's blocks.

Only full blocks of *committed, computed* tokens are shared, so the entries of rejected draft tokens never are. Block 0
is never allocated: padding writes there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

BlockTable: TypeAlias = "array[int]"
"""A shared table only grows in place; any other change makes a new table."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Return block ids as a table; a table is returned as it is."""
    return blocks if isinstance(blocks, array) else array("q", blocks)


def salt_digest(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """Return the parent digest of the first block of requests with this salt; None counts as an empty salt.

    Adapters compute different keys and values. The salt is hashed twice: a block's input begins with what this
    returns, and never with the inner digest, so no salt and no adapter give a block's digest.
    """
    inner = hashlib.sha256((cache_salt or "").encode()).digest()
    return hashlib.sha256(inner + (adapter or "").encode()).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of all tokens up to a block's end; SHA-256, as a collision would leak another user's text."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Reference-counted blocks of one KV cache; free published blocks stay cached until they are allocated again."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        self.num_blocks = num_blocks - 1
        self.block_size = block_size
        self._share = share
        self._references = [0] * num_blocks
        # Blocks without a reference, next to be allocated first; `match` can still take a block that has a digest.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks without a reference."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks; return None if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            if block in self._digest_of:
                del self._block_of[self._digest_of.pop(block)]
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block; a prefix's last blocks are evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was freed twice"
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: Sequence[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        """Take a reference to each block of the longest cached prefix, and return the blocks and their digests."""
        # The last token must be computed, so its block is left out.
        blocks: list[int] = []
        digests: list[bytes] = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            salt = block_digest(salt, token_ids[end - self.block_size : end])
            block = self.take(salt)
            if block is None:
                break
            blocks.append(block)
            digests.append(salt)
        return blocks, digests

    def take(self, digest: bytes) -> int | None:
        """Take a reference to the cached block with a digest; return None if it is not cached."""
        block = self._block_of.get(digest)
        if block is not None:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return block

    def forget(self, block: int, digest: bytes) -> None:
        """Stop sharing an unused block that still has this digest; it is allocated next."""
        if self._digest_of.get(block) == digest and self._references[block] == 0:
            del self._digest_of[block], self._block_of[digest]
            self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full, computed block available to `match`, unless a block with this digest is."""
        if self._share and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def clear(self) -> None:
        """Forget every digest, because the KV cache was lost."""
        self._digest_of.clear()
        self._block_of.clear()
