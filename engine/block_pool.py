"""BlockPool: which KV block belongs to whom; blocks of equal prefixes are shared. Ids only, no tensors.

A block's content is named by the digest of all tokens up to its end, so two requests that start alike find the same
block. A digest is given only to a full block of *committed, computed* tokens: what a rejected draft token left
in a block is never named, and always overwritten before it can be attended to. Block 0 belongs to nobody:
padding writes there.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name of the block that holds `token_ids` after the block named `parent`.

    SHA-256, because a collision would show one user another's text.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """The blocks of one KV cache: allocate, share, free, and evict the least recently used shared ones."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._share = share
        self._references = [0] * num_blocks
        # Blocks without a reference, oldest first. Those with a digest can still be found and revived.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when there are fewer."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block; the tail of a prefix is evicted before its head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was freed twice"
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)

    def match(self, token_ids: Sequence[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        """Take a reference to every block of the longest known prefix, always leaving one token to compute.

        Returns:
            The blocks and their digests.
        """
        blocks: list[int] = []
        digests: list[bytes] = []
        if not self._share:
            return blocks, digests
        parent = salt
        for end in range(self.block_size, len(token_ids), self.block_size):
            parent = block_digest(parent, token_ids[end - self.block_size : end])
            block = self._block_of.get(parent)
            if block is None:
                break
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            blocks.append(block)
            digests.append(parent)
        return blocks, digests

    def publish(self, block: int, digest: bytes) -> None:
        """Name a full, computed block so that others can share it; the first holder of a digest keeps it."""
        if self._share and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def clear(self) -> None:
        """Forget every digest: the memory behind the blocks is gone."""
        self._digest_of.clear()
        self._block_of.clear()
