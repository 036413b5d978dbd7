"""BlockTable: the KV blocks of a request in order, in memory that a forward pass copies at once."""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

BlockTable: TypeAlias = "array[int]"
"""It grows in place; whoever changes it in another way replaces it, or is its only user."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Return block ids as a table, one that is a table as it is."""
    return blocks if isinstance(blocks, array) else array("q", blocks)
