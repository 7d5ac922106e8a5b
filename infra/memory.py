"""Memory that a process frees: kept for its next use, or given back to the kernel.

Knows the C library; must not know who allocates what.
"""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3), and the most it takes for the second.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 * 2**20
_MOST_KEPT_BYTES = 2**30


def keep_freed_memory(memory_mb: int | None = None) -> None:
    """Have what this process frees wait for its next use; where the C library is not glibc, do nothing.

    Up to 1 GiB for each of malloc's arenas, or a quarter of `memory_mb`, the most that this process may use; nothing of
    blocks above 32 MiB, which glibc always gives back at once.

    Under a Dask nanny's default, MALLOC_TRIM_THRESHOLD_=65536, each training step gives back all it frees and fetches
    it again page by page: a third of the step's time, on a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        limit = _MOST_KEPT_BYTES if memory_mb is None else memory_mb * 2**20 // 4
        mallopt(_TRIM_THRESHOLD, min(_MOST_KEPT_BYTES, limit))
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
