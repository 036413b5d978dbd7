"""Huge pages: what a process has loaded, on pages of 2 MiB instead of 4 KiB.

A decode step reads all weights once, so every small page costs a walk through the page tables, of which virtual
machines have two. Linux gives huge pages to memory that was marked before it was first touched. Weights are packed by
libraries that mark nothing, hence MADV_COLLAPSE (Linux 6.1), which moves pages together that are there.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_MAPS, _TOTALS = Path("/proc/self/smaps"), Path("/proc/self/smaps_rollup")
HUGE_PAGE_BYTES = 2**21
_COLLAPSE = 25  # MADV_COLLAPSE of asm-generic/mman-common.h
_FEWEST = 0.5
"""Share of a mapping's pages that must be there already: the others would be filled."""

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)")


def collapse() -> int:
    """Move this process's own memory to huge pages, as far as the kernel can; takes a second for each 2 GB.

    Returns:
        The bytes that are on huge pages now; 0 where there are none: another system, an older kernel.
    """
    if not _MAPS.exists():
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in list(_mappings()):
        libc.madvise(start, stop - start, _COLLAPSE)  # what it cannot move stays where it is
    return sum(int(line.split()[1]) * 1024 for line in _TOTALS.read_text().splitlines() if line.startswith("AnonHuge"))


def _mappings() -> Iterator[tuple[int, int]]:
    """Yield the ranges of whole huge pages in memory that is private, writable, of no file, and mostly there."""
    with _MAPS.open() as lines:
        for line in lines:
            if head := _HEAD.match(line):
                first, last = int(head[1], 16), int(head[2], 16)
                is_own = head[3] == "rw-p" and head[4] == "0" and head[5] in ("", "[heap]")
            elif is_own and line.startswith("Rss:"):
                start, stop = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                if stop > start and int(line.split()[1]) * 1024 >= _FEWEST * (last - first):
                    yield start, stop
