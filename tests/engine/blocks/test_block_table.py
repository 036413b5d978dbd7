"""A block table is copied as memory, and one that is a table already stays the same object."""

import torch

from engine.blocks.block_table import block_table
from engine.execution.batch import block_tensor


def test_a_table_holds_its_blocks_in_order_and_grows_in_place():
    table = block_table([3, 1, 2])
    assert block_table(table) is table
    table += block_table([9])
    table.append(7)
    assert list(table) == [3, 1, 2, 9, 7]
    assert list(block_table()) == []


def test_tables_of_different_lengths_are_copied_side_by_side_and_padded_with_block_0():
    copied = block_tensor([block_table([5, 6, 7]), block_table([8])], torch.device("cpu"))
    assert copied.tolist() == [[5, 6, 7], [8, 0, 0]]
