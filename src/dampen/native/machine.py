"""Which machine this is, and where the kernels built for it are kept."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


def cache_folder() -> Path:
    """$DAMPEN_CACHE, or ~/.cache/dampen."""
    return Path(os.environ.get("DAMPEN_CACHE") or os.path.expanduser("~/.cache/dampen"))


def cpu_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


_INSTRUCTIONS = re.compile(
    r"3dnow|abm|adx|aes|amx|asimd|avx|bmi|cx16|f16c|fma|fphp|gfni|lahf|lzcnt|mmx|movbe|movdir|neon|pclmul|pni|popcnt|sha"
    r"|sse|ssse|sve|tbm|vaes|vfp|vpclmul|xop"
)


def instruction_sets() -> list[str]:
    """What this processor can compute with, by the names that the system gives its features: what a
    compiler may use for it. Not the features of security and power that a new system lists for the
    same processor."""
    info = Path("/proc/cpuinfo")
    found: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found = {flag for flag in value.split() if _INSTRUCTIONS.match(flag)}
                break
    return [
        platform.machine(),
        *(sorted(found) or [platform.processor(), torch.backends.cpu.get_cpu_capability()]),
    ]
