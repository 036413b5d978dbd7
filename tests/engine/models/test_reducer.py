"""Whether a thread leaves out the other ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.models.reducer import alone, is_alone


def fail_alone():
    with ThreadPoolExecutor(1) as other, alone():
        assert (is_alone(), other.submit(is_alone).result()) == (True, False)
        raise RuntimeError


def test_only_the_thread_that_says_so_computes_alone_until_it_fails():
    with pytest.raises(RuntimeError):
        fail_alone()
    assert not is_alone()
