"""Keep freed memory in the process.

On Linux glibc gives large blocks back to the system as soon as they lie at the end of the heap, and the next training
step faults them in anew, page by page: thousands of faults per step, in one process hardly any, in the next a tenth of
its time. Processes that belong to the lab therefore keep what they have once needed.
"""

from __future__ import annotations

import ctypes
import os
import platform

AS_FOUND = "as found"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SIZES = (2**30, 2**25)
"""Bytes: blocks up to this stay on the heap, and free memory at its end below this is not given back. Older versions of
glibc refuse the first."""

_kept = False


def keep_freed_memory() -> bool:
    """Change this process's malloc for good; whether it could be done.

    What the user has said about malloc in the environment (`MALLOC_...`, `GLIBC_TUNABLES`) stays in force, and other C
    libraries stay as they are.
    """
    global _kept
    if not _said() and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # the order counts: the second alone would freeze the limit for blocks at its smallest
        _kept = any(mallopt(M_MMAP_THRESHOLD, size) and mallopt(M_TRIM_THRESHOLD, size) for size in SIZES)
    return _kept


def describe_malloc() -> str:
    """For records: how this process deals with freed memory."""
    return "freed memory kept" if _kept else "set in the environment" if _said() else AS_FOUND


def _said() -> bool:
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
