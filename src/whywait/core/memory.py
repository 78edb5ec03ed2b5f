"""Memory of long analyses: what one array leaves, the next one takes.

The C library gives every large array pages of its own and hands them back with it, and the kernel clears each page
anew: for hundreds of arrays of 80 MB that took more time than the sums. Only glibc has it; elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

FROM = 1 << 21  # rows of a table from which it matters
_TRIM, _MMAP_MAX = -1, -4  # of mallopt(3): at how many free bytes memory is given back, arrays with pages of their own
_DEFAULT_TRIM, _DEFAULT_MMAPS = 128 << 10, 65_536
_depth = 0


@contextlib.contextmanager
def kept(rows: int) -> Iterator[None]:
    """While it lasts, freed memory stays with the process; then all of it is given back. ``rows``: of the longest table
    that is worked on; of a short one nothing is done."""
    global _depth
    libc = _libc() if rows >= FROM else None
    if libc is None:
        yield
        return
    if not _depth:
        libc.mallopt(_TRIM, (1 << 31) - 1)
        libc.mallopt(_MMAP_MAX, 0)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            libc.mallopt(_TRIM, _DEFAULT_TRIM)
            libc.mallopt(_MMAP_MAX, _DEFAULT_MMAPS)
            libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt, libc.malloc_trim  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc
