"""Where a trial ran: versions, commit, machine, threads. No names of people or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dampen.native import library
from dampen.native.library import cpu_name
from dampen.studies.processes import describe_malloc

PACKAGES = (
    "dampen",
    "torch",
    "lightning",
    "torchmetrics",
    "numpy",
    "scikit-learn",
    "timm",
    "transformers",
)


def describe(threads: int, device: str) -> dict[str, Any]:
    """JSON-able facts for the record."""
    return {
        "time": _now(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": threads,
        "malloc": describe_malloc(),
        "kernels": library.path(),
        "device": device,
        "packages": dict(versions()),
        "commit": commit(),
    }


@cache
def versions() -> dict[str, str]:
    """The installed versions of what can change a result; read once, because it takes
    as long as some steps."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str | None:
    """The commit of the source tree this package runs from, with '+' if files were changed; None
    when installed.

    Read once: code that was imported stays as it was.
    """
    found = git_state(Path(__file__).resolve().parents[1])  # the whole package
    return found["commit"] + "+" * found["dirty"] if found else None


def git_state(folder: Path | None) -> dict[str, Any]:
    """The commit of the repository that a folder belongs to, and whether tracked files in it were
    changed; empty where there is none.

    Args:
        folder: of somebody's code, or None.
    """
    if folder is None or not any((p / ".git").exists() for p in (folder, *folder.parents)):
        return {}
    try:
        head, status = (
            subprocess.run(
                ["git", *command.split()], cwd=folder, capture_output=True, text=True, timeout=10
            )
            for command in (
                "rev-parse --short=12 HEAD",
                "status --porcelain --untracked-files=no -- .",
            )
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if head.returncode != 0:
        return {}
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def usable_cores() -> int:
    """How many cores this process may use: its affinity, cut by the quota of its control group."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()[:2]
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def asked_threads() -> int | None:
    """The number of threads that the environment requests, as OpenMP reads it: OMP_NUM_THREADS, if
    it is a number."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(said) if said.isdigit() and int(said) > 0 else None


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
