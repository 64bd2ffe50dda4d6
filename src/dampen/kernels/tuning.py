"""The table of kernels, measured on the user's own machine and kept for the next time.

`dampen doctor --tune` measures from how many keys on the fused attention kernel is faster, and writes it into a file of
its own per processor and version of torch, in $DAMPEN_CACHE or ~/.cache/dampen. `dampen.kernels.kernel` reads it when a
regularizer is first attached or used, never at import and never inside a compiled graph.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.native.machine import cache_folder, machine_key

FORMAT = 1
LENGTHS = (16, 32, 48, 65, 128, 197, 256, 512, 1024, 2048)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Limits = dict[tuple[str, torch.dtype], int]
"""(device type, dtype) -> keys below which the matrix of scores beats the fused kernel."""
Measured = list[tuple[int, float, float]]
"""Keys, fused / plain without a mask, fused / plain with one; above 1 plain is faster."""


def cache_path() -> Path:
    """The file for this machine."""
    digest = hashlib.sha256(json.dumps([FORMAT, machine_key()], sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"kernels-{digest}.json"


def load() -> Limits:
    """The limits that were measured on this machine; nothing where none were. A damaged file is ignored, aloud."""
    path = folder = cache_folder()
    try:
        if not folder.is_dir() or not any(folder.glob("kernels-*.json")):  # the usual case costs one look at a folder
            return {}
        path = cache_path()
        return _read(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"the kernel table in {path} cannot be used ({type(error).__name__}: {error}); the one that comes with "
            "dampen is used instead. Run `dampen doctor --tune` to measure it again, or delete the file.",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def _read(content: Any) -> Limits:
    if content["format"] != FORMAT or content["machine"] != machine_key():
        raise ValueError("it was measured on another machine or by another version")
    limits: Limits = {}
    for row in content["plain_below"]:
        keys = row["keys"]
        if isinstance(keys, bool) or not isinstance(keys, int) or keys < 0:
            raise ValueError(f"a number of keys was expected, got {keys!r}")
        limits[str(row["device"]), DTYPES[row["dtype"]]] = keys
    return limits


def save(measured: dict[tuple[str, str], Measured]) -> Path:
    """Write the limits that follow from the measurement; the file is there whole, or as it was."""
    from datetime import date

    content = {
        "format": FORMAT,
        "machine": machine_key(),
        "date": date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "plain_below": [{"device": d, "dtype": t, "keys": crossover(rows)} for (d, t), rows in measured.items()],
        "fused_over_plain": {f"{d} {t}": rows for (d, t), rows in measured.items()},
    }
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def crossover(rows: Iterable[tuple[int, float, float]]) -> int:
    """Keys from which fused should run: the limit for which all measured lengths together take least time.

    >>> crossover([(16, 1.5, 1.4), (32, 1.1, 1.2), (64, 0.9, 1.0), (128, 0.7, 0.8)])
    64
    """
    ordered = sorted(rows)
    if not ordered:
        return 0
    gain = [0.5 * (math.log(bare) + math.log(masked)) for _, bare, masked in ordered]  # of plain over fused
    limits = [n for n, _, _ in ordered] + [ordered[-1][0] + 1]
    lost = [sum(gain[i:]) for i in range(len(limits))]  # by running fused from limits[i] on
    best = min(range(len(limits)), key=lambda i: (lost[i], i))
    return limits[best] if best else 0


def tune(
    rounds: int = 7,
    lengths: Sequence[int] = LENGTHS,
    dtypes: Sequence[str] = tuple(DTYPES),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path, dict[tuple[str, str], Measured]]:
    """Measure every device and dtype of this machine, keep the result and use it from now on."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    total, done = len(devices) * len(dtypes) * len(lengths), 0
    measured: dict[tuple[str, str], Measured] = {}
    for device in devices:
        for dtype in dtypes:
            rows = measured.setdefault((device, dtype), [])
            for n in lengths:
                progress(done, total)
                bare, masked = (measure(DTYPES[dtype], n, m, rounds, device) for m in (False, True))
                rows.append((n, bare, masked))
                done += 1
    path = save(measured)
    from dampen.kernels.kernel import use_tuned_table

    use_tuned_table(again=True)
    return path, measured


def measure(dtype: torch.dtype, keys: int, masked: bool, rounds: int, device: str = "cpu", size: int = 32) -> float:
    """fused / plain of attention alone, forward and backward, interleaved."""
    from dampen.kernels.timing import compare

    batch = max(1, int(96 * (65 / keys) ** 1.5))  # about the same time at every length
    shape = (batch, 8, keys, size)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)
    keep = torch.rand(batch, 8, keys, keys, device=device) > 0.3 if masked else None

    def run(attention: Callable[..., Tensor]) -> Callable[[], None]:
        def call() -> None:
            torch.autograd.grad(attention(q, k, v, keep), (q, k, v), gradient)
            if device == "cuda":
                torch.cuda.synchronize()

        return call

    return compare({"plain": run(_plain), "fused": run(_fused)}, "plain", rounds=rounds)["fused"].median


def _plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    out: Tensor = (s if keep is None else s.masked_fill(~keep, torch.finfo(s.dtype).min)).softmax(-1) @ v
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep)
