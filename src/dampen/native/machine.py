"""Which machine this is, and where what was measured and built for it is kept."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


def cache_folder() -> Path:
    """$DAMPEN_CACHE, or ~/.cache/dampen."""
    said = os.environ.get("DAMPEN_CACHE")
    return Path(said or os.path.expanduser("~/.cache/dampen"))


def machine_key() -> dict[str, str]:
    """What a table holds for: another processor or torch needs its own."""
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "",  # not the device's name: asking for it would start CUDA
        "torch": torch.__version__,
    }


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
    """What this processor can compute with, by the names that the system gives its features: what a compiler may use
    for it. Not the features of security and power that a new system lists for the same processor."""
    info = Path("/proc/cpuinfo")
    found: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found = {flag for flag in value.split() if _INSTRUCTIONS.match(flag)}
                break
    return [platform.machine(), *(sorted(found) or [platform.processor(), torch.backends.cpu.get_cpu_capability()])]
