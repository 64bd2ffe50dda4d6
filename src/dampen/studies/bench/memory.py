"""Peak memory of a call, counted allocation by allocation, so that it is the same on every run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(run: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that tensors allocated inside `run` occupy at once; what existed before counts nothing.

    >>> peak_memory(lambda: torch.zeros(1000, dtype=torch.uint8)) >= 1000
    True
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(run, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells the terminal each start and stop
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what earlier work left in cycles would otherwise be given back inside, and count as less
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    inner: Any = profiler.profiler
    now = peak = 0
    for event in inner.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()  # negative where memory is given back
            peak = max(peak, now)
    return peak


def _cuda_peak(run: Callable[[], Any], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_memory() -> int:
    """Bytes that this machine can still give; half of what it has where that is not known."""
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
