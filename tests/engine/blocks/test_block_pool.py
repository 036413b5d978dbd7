"""Which block belongs to whom, and what can be found again."""

from array import array

import pytest

from engine.blocks.block_pool import BlockPool, block_digest, salt_digest

SALT = b"salt"


def digests(token_ids, block_size=4, salt=SALT):
    """The names of all full blocks of a run of tokens."""
    names, parent = [], salt
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_digest(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names


def published(pool, token_ids, salt=SALT):
    """Allocate and publish the blocks of a run of tokens; their owner still holds them."""
    blocks = pool.allocate(-(-len(token_ids) // pool.block_size))
    for block, digest in zip(blocks, digests(token_ids, pool.block_size, salt), strict=False):
        pool.publish(block, digest)
    return blocks


def cached_blocks(pool, token_ids, salt=SALT):
    """The blocks that are known of a prefix; their references are given back."""
    blocks, _ = pool.match(token_ids, salt)
    pool.free(blocks)
    return blocks


def test_a_block_freed_twice_is_a_bug():
    pool = BlockPool(4, block_size=4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_a_prefix_is_found_while_its_owner_holds_it_and_after():
    pool = BlockPool(9, block_size=4)
    tokens = list(range(9))
    blocks = published(pool, tokens)
    shared, names = pool.match(tokens, SALT)
    assert shared == blocks[:2]
    assert names == digests(tokens)
    pool.free(blocks)
    pool.free(shared)
    assert cached_blocks(pool, tokens) == blocks[:2]
    assert cached_blocks(pool, tokens[:8]) == blocks[:1], "one token is always left to compute"
    assert cached_blocks(pool, [*range(4), 99, *range(5, 13)]) == blocks[:1]


def test_token_ids_of_any_size_have_different_digests():
    assert len({block_digest(SALT, [token]) for token in (1, 2**8 + 1, 2**16 + 1, 2**32 + 1)}) == 4
    assert block_digest(SALT, [1, 2]) != block_digest(SALT, [2, 1])


def test_unpublished_blocks_are_allocated_before_published_ones():
    pool = BlockPool(4, block_size=4)
    blocks = published(pool, [1] * 9)[:2]
    pool.free([*blocks, 3])
    assert pool.allocate(1) == [3]
    pool.free([3])
    assert pool.allocate(2) == [3, blocks[1]]
    assert cached_blocks(pool, [1] * 9) == blocks[:1]


def test_the_prefix_that_was_freed_first_is_evicted_first():
    pool = BlockPool(3, block_size=4)
    old, new = published(pool, [1] * 4), published(pool, [2] * 4)
    pool.free(old)
    pool.free(new)
    assert cached_blocks(pool, [1] * 5) == old  # used again, so that it is the younger one now
    assert pool.allocate(1) == new
    assert cached_blocks(pool, [1] * 5) == old
    assert cached_blocks(pool, [2] * 5) == []


def test_a_block_is_taken_by_its_digest_alone_and_nobody_gets_it_meanwhile():
    pool = BlockPool(4, block_size=4)
    pool.free(published(pool, [1] * 8))
    first, second = digests([1] * 8)
    assert pool.take(b"unknown") is None
    block = pool.take(second)
    assert block not in pool.allocate(2)
    assert (pool.take(first), pool.take(second), pool.num_free) == (None, block, 0)


def test_a_forgotten_block_is_allocated_next_but_not_if_it_is_used_or_another_one_by_now():
    pool = BlockPool(5, block_size=4)
    held, forgotten, kept = (published(pool, [token] * 4) for token in (1, 2, 3))
    pool.free(kept)
    pool.free(forgotten)
    for blocks, token in ((held, 1), (forgotten, 2), (kept, 2)):
        pool.forget(blocks[0], digests([token] * 4)[0])
    assert [cached_blocks(pool, [token] * 5) for token in (1, 2, 3)] == [held, [], kept]
    assert pool.allocate(1) == forgotten


def test_a_cleared_pool_finds_nothing_and_loses_no_block():
    pool = BlockPool(4, block_size=4)
    held = published(pool, [1] * 4)
    pool.free(published(pool, [2] * 4))
    pool.clear()
    assert cached_blocks(pool, [1] * 5) == []
    assert cached_blocks(pool, [2] * 5) == []
    assert pool.num_free == 2
    pool.free(held)
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_no_salt_has_the_digest_of_a_block():
    """Else a client could choose a salt that makes its own blocks continue the prefix of others."""
    parent, tokens = b"p" * 32, [1, 2, 3, 4]
    salt = (parent + array("q", tokens).tobytes()).decode()
    assert salt_digest(salt) != block_digest(parent, tokens)
    assert len({salt_digest(salt) for salt in (None, "a", "b", "A", " a")}) == 5
