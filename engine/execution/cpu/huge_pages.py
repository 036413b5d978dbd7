"""Huge pages: what a process has loaded, on pages of 2 MiB instead of 4 KiB.

A decode step reads all weights once, so every small page costs a walk through the page tables, of which virtual
machines have two. Memory can be marked for huge pages before it is first touched, but weights are packed by libraries
that mark nothing, hence MADV_COLLAPSE (Linux 6.1), which moves pages together that are there.

Weights that are served as their file has them are pages of that file, which other processes share; those stay.
"""

import ctypes
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2**21
COLLAPSE_AFTER_S = 5.0

_MAPS = Path("/proc/self/smaps")
_NORMAL, _COLLAPSE = 0, 25  # MADV_NORMAL, which changes nothing, and MADV_COLLAPSE of asm-generic/mman-common.h
_FEWEST = 0.5
"""Share of a mapping that must be there already: a huge page fills what its range lacks."""

_one_at_a_time = threading.Lock()

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


def collapse_soon(name: str) -> None:
    """Call `collapse` in the background, a little later: what this model works with may still be loading."""
    timer = threading.Timer(COLLAPSE_AFTER_S, collapse, [name])
    timer.daemon = True
    timer.start()


def collapse(name: str) -> None:
    """Move this process's memory to huge pages and log how much of it is there, in a model's name."""
    started = time.monotonic()
    moved, total = collapse_all()
    text = "%s: %.0f of %.0f MB of this process on huge pages after %.1f s"
    logger.info(text, name, moved / 1e6, total / 1e6, time.monotonic() - started)


def collapse_all() -> tuple[int, int]:
    """Move all memory of this process, KV blocks included, to huge pages; takes a second for each 0.3 to 1 GB.

    Passes may run meanwhile, and memory may come and go.

    Returns:
        The bytes that are on huge pages now, and those that were to be; none of them, with the reason in the log,
        where this system cannot do it.
    """
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with _one_at_a_time:
            return _collapse(madvise)
    except (OSError, AttributeError) as error:
        logger.info("no huge pages: %s", error)
        return 0, 0


def _collapse(madvise: Callable[[int, int, int], int]) -> tuple[int, int]:
    starts = [start for first, last in _mappings() for start in range(first, last, HUGE_PAGE_BYTES)]
    moved, wanted, problem = 0, len(starts) * HUGE_PAGE_BYTES, 0
    for start in starts:  # one by one: some kernels give up the rest of a range for a part that nothing has touched
        if madvise(start, HUGE_PAGE_BYTES, _COLLAPSE) == 0:
            moved += HUGE_PAGE_BYTES
        elif (problem := ctypes.get_errno()) == errno.ENOMEM and madvise(start, HUGE_PAGE_BYTES, _NORMAL) == 0:
            break  # not because the range is gone: each further call would look for a free one as long as this one
    if problem and moved < wanted / 2:
        logger.info("few huge pages: %s", os.strerror(problem))
    return moved, wanted


def _mappings() -> Iterator[tuple[int, int]]:
    """Yield the ranges of whole huge pages in memory that is private, writable, of no file, and mostly there."""
    with _MAPS.open() as lines:
        for line in lines:
            if head := _HEAD.match(line):
                first, last = int(head[1], 16), int(head[2], 16)
                is_nameless = head[5] in ("", "[heap]") or head[5].startswith("[anon:")
                is_own = head[3] == "rw-p" and head[4] == "0" and is_nameless
            elif is_own and line.startswith("Rss:"):
                start, stop = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                if stop > start and int(line.split()[1]) * 1024 >= _FEWEST * (last - first):
                    yield start, stop
