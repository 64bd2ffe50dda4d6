"""Keep freed memory in the process.

On Linux glibc gives large blocks back to the system as soon as they lie at the end of the heap, and the next training
step faults them in anew, page by page: thousands of faults per step, in one process hardly any, in the next a tenth of
its time. Processes that belong to the lab therefore keep what they have once needed.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = 2**30
"""Bytes: free memory at the end of the heap below which nothing is given back, and blocks that stay on the heap."""

_kept = False


def keep_freed_memory() -> bool:
    """Change this process's malloc for good; whether it could be done.

    What the user has said about malloc in the environment (`MALLOC_...`, `GLIBC_TUNABLES`) stays in force, and other C
    libraries stay as they are.
    """
    global _kept
    said = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not said and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        _kept = all(mallopt(option, KEPT) == 1 for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
    return _kept


def describe_malloc() -> str:
    """For records: how this process deals with freed memory."""
    return "freed memory kept" if _kept else "as found"
