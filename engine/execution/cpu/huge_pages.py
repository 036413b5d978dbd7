"""Huge pages: moves this process's memory from pages of 4 KiB to pages of 2 MiB.

A decode step reads all weights once, so every small page costs a walk through the page tables, twice as long on virtual
machines. Memory can be marked for huge pages only before it is first used, and the libraries that allocate weights do
not mark it. MADV_COLLAPSE (Linux 6.1) works on memory that is already in use.

Weights that are mapped from a file stay as they are, because other processes share those pages.
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
_MIN_RESIDENT = 0.5
"""Fraction of a mapping that must be resident, because a huge page also allocates the rest of its range."""

_one_at_a_time = threading.Lock()

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


def collapse_soon(name: str) -> None:
    """Call `collapse` in the background after a few seconds, when other models and KV caches are allocated."""
    timer = threading.Timer(COLLAPSE_AFTER_S, collapse, [name])
    timer.daemon = True
    timer.start()


def collapse(name: str) -> None:
    """Move this process's memory to huge pages, and log how much was moved."""
    started = time.monotonic()
    moved, total = collapse_all()
    text = "%s: %.0f of %.0f MB of this process on huge pages after %.1f s"
    logger.info(text, name, moved / 1e6, total / 1e6, time.monotonic() - started)


def collapse_all() -> tuple[int, int]:
    """Move all memory of this process, KV blocks included, to huge pages; takes a second for each 0.3 to 1 GB.

    Passes may run, and memory may be allocated and freed meanwhile.

    Returns:
        The bytes that are on huge pages now, and the bytes that were tried; (0, 0) if the system does not support it.
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
    moved, total, problem = 0, len(starts) * HUGE_PAGE_BYTES, 0
    for start in starts:  # one page at a time, because some kernels stop at the first untouched page of a range
        if madvise(start, HUGE_PAGE_BYTES, _COLLAPSE) == 0:
            moved += HUGE_PAGE_BYTES
        elif (problem := ctypes.get_errno()) == errno.ENOMEM and madvise(start, HUGE_PAGE_BYTES, _NORMAL) == 0:
            break  # the range exists, so no huge page is free, and each further call would search as long for one
    if problem and moved < total / 2:
        logger.info("few huge pages: %s", os.strerror(problem))
    return moved, total


def _mappings() -> Iterator[tuple[int, int]]:
    """Yield ranges of whole huge pages in memory that is private, writable, anonymous and mostly resident."""
    with _MAPS.open() as lines:
        for line in lines:
            if head := _HEAD.match(line):
                first, last = int(head[1], 16), int(head[2], 16)
                is_unnamed = head[5] in ("", "[heap]") or head[5].startswith("[anon:")
                is_private = head[3] == "rw-p" and head[4] == "0" and is_unnamed
            elif is_private and line.startswith("Rss:"):
                start, stop = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                if stop > start and int(line.split()[1]) * 1024 >= _MIN_RESIDENT * (last - first):
                    yield start, stop
