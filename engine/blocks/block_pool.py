"""BlockPool: allocates KV blocks by id and shares the blocks of equal prefixes; BlockTable: those of a request.

The digest of all tokens up to a block's end identifies it. Only full blocks of *committed, computed* tokens are
published. So the entry of a rejected draft token is never shared, and a later pass overwrites it before attending to
it. Block 0 is never allocated: padding writes there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

BlockTable: TypeAlias = "array[int]"
"""It grows in place; whoever changes it in another way replaces it, or is its only user."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Return block ids as a table, one that is a table as it is."""
    return blocks if isinstance(blocks, array) else array("q", blocks)


def salt_digest(cache_salt: str | None) -> bytes:
    """Return the parent digest of the first block of requests with this salt; None counts as a salt.

    The salt is hashed twice, so that the outer input has 32 bytes. Block inputs are longer, so a client-chosen salt can
    never collide with a block digest.
    """
    return hashlib.sha256(hashlib.sha256((cache_salt or "").encode()).digest()).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of the block that holds `token_ids` after the block with digest `parent`.

    It is SHA-256, because a collision would leak one user's text to another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Reference-counted blocks of one KV cache; free published blocks stay cached until they are allocated again."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        self.num_blocks = num_blocks - 1
        """Blocks that can be allocated."""
        self.block_size = block_size
        self._share = share
        self._references = [0] * num_blocks
        # Blocks without a reference, next to be allocated first. `match` can still take those with a digest.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
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
        """Drop one reference to each block; a prefix's last blocks are evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was freed twice"
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: Sequence[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        """Take a reference to each block of the longest cached prefix, one token left out; return blocks, digests."""
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
        """Take a reference to the cached block with a digest; None if there is none."""
        block = self._block_of.get(digest)
        if block is not None:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        return block

    def forget(self, block: int, digest: bytes) -> None:
        """Stop sharing a block, if it still has this digest and nobody uses it; it is allocated next."""
        if self._digest_of.get(block) == digest and self._references[block] == 0:
            del self._digest_of[block], self._block_of[digest]
            self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full, computed block available to `match`; the first block with a digest stays the shared one."""
        if self._share and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def clear(self) -> None:
        """Forget every digest, because the KV cache was lost."""
        self._digest_of.clear()
        self._block_of.clear()
