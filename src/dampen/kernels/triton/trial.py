"""May the Triton kernels be used on this card? They run a small problem first, beside dense
attention.

We have compiled them for these cards and interpreted them, and run them on none. So the first call
of each form compares outputs and gradients with dense attention in float64, and the draws with
those of other tiles. The verdict is kept in the cache folder for this card and these versions of
torch, Triton and dampen. What differs, or cannot be compiled, is not used, and a warning says so.
`dampen doctor --gpu` runs every form.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen._torch import constant_in_graphs, outside_tracing
from dampen.kernels.triton.tiles import DROP_WEIGHTS, HIDE_TOP, NOTHING, Tile, padded
from dampen.native.library import cache_folder

OLDEST = (3, 2)
"""The Triton of torch 2.6, the oldest torch that dampen takes. Tested with 3.7."""
OLDEST_CARD = (8, 0)
"""Compute capability from which cards have asynchronous copies and bfloat16."""
TOKENS, RATE = 200, 0.25
TIMES = 4.0
"""How many times the error of torch's attention in the same dtype a kernel may have."""

_verdicts: dict[str, str] = {}


def missing() -> str:
    """Why the kernels cannot even be tried here, in a few words; "" where they can."""
    if os.environ.get("DAMPEN_TRITON", "1") == "0":
        return "switched off by DAMPEN_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    version = metadata.version(_distribution())
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST:
        return f"Triton {version} is older than {'.'.join(map(str, OLDEST))}"
    return ""


def _distribution() -> str:
    """Triton's name among installed packages: ROCm and older nightly builds have their own."""
    return next(
        (n for n in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
         if _installed(n)), "triton"
    )  # fmt: skip


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def refused(q: Tensor, dtype: torch.dtype, draws: int) -> str:
    """Why the kernels are not used for such operands, in a few words; "" where they are.

    Args:
        q: (B, H, N, d), on the card.
        dtype: in which attention is computed.
        draws: HIDE_KEYS, DROP_WEIGHTS or HIDE_TOP.
    """
    why: str = _refused(q.device.type, q.device.index or 0, dtype, padded(q.shape[3]), draws)
    return why


@constant_in_graphs
def _refused(kind: str, index: int, dtype: torch.dtype, size: int, draws: int) -> str:
    if why := missing():
        return why
    device = torch.device(kind, index)
    key = f"{card(device)} {str(dtype).removeprefix('torch.')} {size} {draws}"
    if key in _verdicts:
        return _verdicts[key]
    path = verdict_path(device)
    kept = json.loads(path.read_text()) if path.exists() else {}
    if key not in kept:
        if kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not tried yet, and a CUDA graph is being captured"
        with outside_tracing():
            kept[key] = verdict(device, dtype, size, draws)
        _write(path, kept)
        if kept[key]:
            warnings.warn(
                f"dampen's Triton kernels are not used on {card(device)} ({kept[key]}); attention "
                "runs on torch. Please send in the file that `dampen doctor --gpu` writes.",
                stacklevel=2,
            )
    _verdicts[key] = kept[key]
    return _verdicts[key]


def card(device: torch.device) -> str:
    """The name of a card and its architecture.

    Args:
        device: where the operands are.
    """
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return f"{properties.name} {properties.gcnArchName}"
    return f"{properties.name} sm_{properties.major}{properties.minor}"


def verdict_path(device: torch.device) -> Path:
    """Where the verdicts on a card are kept.

    Args:
        device: the card.
    """
    sources = [p.read_text() for p in sorted(Path(__file__).parent.glob("*.py"))]
    known = [card(device), torch.__version__, metadata.version(_distribution()), *sources]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_folder() / f"gpu-{digest[:12]}.json"


def _write(path: Path, kept: dict[str, str]) -> None:
    """Keep the verdicts; a cache folder that cannot be written to costs a trial per process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        whole.write_text(json.dumps(kept, indent=1))
        whole.replace(path)
    except OSError as error:
        warnings.warn(f"dampen could not keep the trial of its GPU kernels: {error}", stacklevel=3)


def verdict(device: torch.device, dtype: torch.dtype, size: int, draws: int) -> str:
    """Compare the kernels with dense attention; what is wrong, "" where nothing is.

    Args:
        device: where to run.
        dtype: of the operands.
        size: channels of a head.
        draws: HIDE_KEYS, DROP_WEIGHTS or HIDE_TOP.
    """
    if device.type == "cuda" and not torch.version.hip:
        found = torch.cuda.get_device_capability(device)
        if found < OLDEST_CARD:
            return f"compute capability {found[0]}.{found[1]}, older than 8.0"
    try:
        for causal in (False, True):
            if wrong := _compare(device, dtype, size, draws, causal):
                return wrong
    except Exception as error:  # a compiler may fail in any way: then torch computes attention
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def errors(
    device: torch.device, dtype: torch.dtype, size: int, draws: int, causal: bool
) -> tuple[list[float], list[float], Tensor]:
    """The largest errors of output, dq, dk and dv: the kernels', and those of torch's attention in
    the same dtype. Also what was drawn.

    Args:
        device: where to run.
        dtype: of the operands.
        size: channels of a head.
        draws: NOTHING, HIDE_KEYS, DROP_WEIGHTS or HIDE_TOP.
        causal: each query sees the keys up to its own place.
    """
    from dampen.kernels.triton import ops

    made = torch.Generator().manual_seed(0)
    shape = (1, 4, TOKENS, size)
    q, k, v, grad = (torch.randn(shape, generator=made).to(device, dtype) for _ in range(4))
    k, v = k[:, :2], v[:, :2]
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    seed, rate = torch.tensor(1234567, device=device), torch.tensor(RATE, device=device)
    places = (1, 4, TOKENS, TOKENS)
    drawn = ops.draws_of(places, seed, rate, Tile(32, 64, 4, 1))
    if not torch.equal(drawn, ops.draws_of(places, seed, rate, Tile(64, 32, 4, 1))):
        raise RuntimeError("the draws depend on the size of the tiles")
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device)
    allowed = (allowed.tril() if causal else allowed).expand(places)
    scale = size**-0.5
    s = (q.double() @ k.double().repeat_interleave(2, 1).mT * scale).detach()
    top = None
    if draws == HIDE_TOP:
        largest = s.masked_fill(~allowed, float("-inf")).topk(9, dim=-1).values
        top = largest[..., 7:].mean(-1).nan_to_num(neginf=-1e30).float().contiguous()
        drawn = drawn & (s >= top.unsqueeze(-1))
    with torch.enable_grad():
        o, _, back = torch.ops.dampen.gpu_attention(
            q, k, v, None, None, top, seed, rate, causal, scale, draws, draws != DROP_WEIGHTS
        )
        ours = [o, *torch.autograd.grad(o, (q, k, v), grad)]
        keep = allowed if draws in (NOTHING, DROP_WEIGHTS) else allowed & ~drawn
        if back.numel():  # where a query lost all its keys
            keep = keep | (torch.arange(TOKENS, device=device) == back.unsqueeze(-1))
        dense = []
        for kind in (torch.float64, dtype):
            x = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
            keys, values = (t.repeat_interleave(2, 1) for t in x[1:])
            a = (x[0] @ keys.mT * scale).masked_fill(~keep, float("-inf")).softmax(-1)
            if draws == DROP_WEIGHTS:
                a = a * ~drawn / (1 - RATE)
            out = a @ values
            dense.append([out, *torch.autograd.grad(out, x, grad.to(kind))])
    exact, theirs = dense
    return (
        [(a - e).abs().max().item() for a, e in zip(ours, exact, strict=True)],
        [(a - e).abs().max().item() for a, e in zip(theirs, exact, strict=True)],
        drawn,
    )


def _compare(device: torch.device, dtype: torch.dtype, size: int, draws: int, causal: bool) -> str:
    ours, torchs, drawn = errors(device, dtype, size, draws, causal)
    if draws != HIDE_TOP:
        share = drawn.float().mean().item()
        if abs(share - RATE) > 6 * (RATE * (1 - RATE) / drawn.numel()) ** 0.5:
            return f"{share:.4f} of the keys are drawn instead of {RATE}"
    for name, mine, other in zip(("output", "dq", "dk", "dv"), ours, torchs, strict=True):
        if not mine <= TIMES * other + 1e-5:  # also where it is NaN
            form = "causal" if causal else "full"
            return f"{form} {name} is off by {mine:.2g}, torch's attention by {other:.2g}"
    return ""


def report(device: torch.device) -> dict[str, Any]:
    """Every form on a card: the file that `dampen doctor --gpu` writes.

    Args:
        device: the card.
    """
    import triton

    forms = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (32, 64, 128):
            for draws in range(NOTHING, HIDE_TOP + 1):
                name = f"{str(dtype).removeprefix('torch.')} {size} {draws}"
                forms[name] = verdict(device, dtype, size, draws) or "ok"
    return {
        "card": card(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "forms": forms,
    }
