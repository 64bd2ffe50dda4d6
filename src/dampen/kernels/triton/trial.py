"""May the Triton kernels be used on this card? They run a small problem first, beside dense
attention.

We have compiled them for these cards and interpreted them, and run them on none. So the first call
of each form (dtype, head size, what is drawn, mask, bias) compares outputs and gradients with dense
attention in float64, and the draws with those of other tiles. The verdict is kept in the cache
folder for this card and these versions of torch, Triton and dampen. What differs, or cannot be
compiled, is not used, and a warning says so. `dampen doctor --gpu` runs every dtype and kind of
draws.
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
from dampen.kernels.triton.tiles import (
    BY_BITS,
    BY_KEY,
    BY_NONE,
    BY_QUERY,
    DROP_WEIGHTS,
    HIDE_KEYS,
    HIDE_TOP,
    NOTHING,
    Form,
    Tile,
)
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


def refused(device: torch.device, form: Form) -> str:
    """Why the kernels are not used for such an attention, in a few words; "" where they are.

    Args:
        device: the card.
        form: what the kernels would be compiled for.
    """
    why: str = _refused(device.type, device.index or 0, *form)
    return why


@constant_in_graphs
def _refused(kind: str, index: int, *parts: Any) -> str:
    if why := missing():
        return why
    device, form = torch.device(kind, index), Form(*parts)
    key = f"{card(device)} {form}"
    if key in _verdicts:
        return _verdicts[key]
    path = verdict_path(device)
    kept = _read(path)
    if key not in kept:
        if kind == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not tried yet, and a CUDA graph is being captured"
        with outside_tracing():
            kept[key] = verdict(device, form)
        _write(path, {**_read(path), key: kept[key]})
        if kept[key]:
            warnings.warn(
                f"dampen's Triton kernels are not used on {card(device)} for {form} ({kept[key]}); "
                "attention runs on torch. Please send in the file that `dampen doctor --gpu` "
                "writes.",
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


def _read(path: Path) -> dict[str, str]:
    """The verdicts that were kept; a file that cannot be read costs a trial."""
    try:
        found: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, kept: dict[str, str]) -> None:
    """Keep the verdicts; a cache folder that cannot be written to costs a trial per process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        whole.write_text(json.dumps(kept, indent=1))
        whole.replace(path)
    except OSError as error:
        warnings.warn(f"dampen could not keep the trial of its GPU kernels: {error}", stacklevel=3)


def verdict(device: torch.device, form: Form) -> str:
    """Compare the kernels with dense attention; what is wrong, "" where nothing is.

    Args:
        device: where to run.
        form: dtype, head size, what is drawn, mask and bias.
    """
    if device.type == "cuda" and not torch.version.hip:
        found = torch.cuda.get_device_capability(device)
        if found < OLDEST_CARD:
            return f"compute capability {found[0]}.{found[1]}, older than 8.0"
    try:
        for guard in form.guards:
            if wrong := _compare(device, form, guard):
                return wrong
    except Exception as error:  # a compiler may fail in any way: then torch computes attention
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def errors(
    device: torch.device, form: Form, guard: bool
) -> tuple[list[float], list[float], Tensor]:
    """The largest errors of output, dq, dk and dv: the kernels', and those of torch's attention in
    the same dtype. Also what was drawn.

    Args:
        device: where to run.
        form: dtype, head size, what is drawn, mask and bias.
        guard: a query that loses all its keys gets one back.
    """
    from dampen.kernels.triton import ops

    dtype, size, draws = form.dtype, form.size, form.draws
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
    mask, allowed = _mask_of(form, places, made, device)
    bias = torch.randn(1, 4, *places[2:], generator=made).to(device, dtype) if form.biased else None
    scale = size**-0.5
    added = torch.zeros((), device=device, dtype=dtype) if bias is None else bias
    s = (q.double() @ k.double().repeat_interleave(2, 1).mT * scale + added.double()).detach()
    top = None
    if draws == HIDE_TOP:
        largest = s.masked_fill(~allowed, float("-inf")).topk(9, dim=-1).values
        top = largest[..., 7:].mean(-1).nan_to_num(neginf=-1e30).float().contiguous()
        drawn = drawn & (s >= top.unsqueeze(-1))
    with torch.enable_grad():
        o, _, back = torch.ops.dampen.gpu_attention(
            q, k, v, mask, bias, top, seed, rate, form.causal, scale, draws, guard
        )
        ours = [o, *torch.autograd.grad(o, (q, k, v), grad)]
        keep = allowed if draws in (NOTHING, DROP_WEIGHTS) else allowed & ~drawn
        if guard:  # where a query lost all its keys
            keep = keep | (torch.arange(TOKENS, device=device) == back.unsqueeze(-1))
        dense = []
        for kind in (torch.float64, dtype):
            x = [t.detach().to(kind).requires_grad_() for t in (q, k, v)]
            keys, values = (t.repeat_interleave(2, 1) for t in x[1:])
            logits = x[0] @ keys.mT * scale + added.to(kind)
            a = logits.masked_fill(~keep, float("-inf")).softmax(-1)
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


def _mask_of(
    form: Form, places: tuple[int, int, int, int], made: torch.Generator, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """The mask that the kernels get, and the keys that each query may see because of it."""
    from dampen.kernels.triton.fit import packed

    allowed = torch.ones(places[2:], dtype=torch.bool, device=device)
    allowed = (allowed.tril() if form.causal else allowed).expand(places)
    if form.masked == BY_NONE:
        return None, allowed
    queries = 1 if form.masked == BY_KEY else places[2]
    mask = (torch.rand((1, 1, queries, places[3]), generator=made) < 0.6).to(device)
    mask[..., 0] = True  # a query without any key has no softmax
    return (packed(mask) if form.masked == BY_BITS else mask), allowed & mask


def _compare(device: torch.device, form: Form, guard: bool) -> str:
    ours, torchs, drawn = errors(device, form, guard)
    if form.draws != HIDE_TOP:
        share = drawn.float().mean().item()
        if abs(share - RATE) > 6 * (RATE * (1 - RATE) / drawn.numel()) ** 0.5:
            return f"{share:.4f} of the keys are drawn instead of {RATE}"
    for name, mine, other in zip(("output", "dq", "dk", "dv"), ours, torchs, strict=True):
        if not mine <= TIMES * other + 1e-5:  # also where it is NaN
            return f"{name} of {form} is off by {mine:.2g}, torch's attention by {other:.2g}"
    return ""


def forms() -> list[Form]:
    """What `dampen doctor --gpu` tries: what is drawn by dtype and head size, causal or not; masks
    and biases."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    every = range(NOTHING, HIDE_TOP + 1)
    found = [Form(t, size, d) for t in dtypes for size in (32, 64, 128) for d in every]
    found += [Form(torch.bfloat16, 64, d, causal=True) for d in every]
    found += [Form(torch.bfloat16, 64, HIDE_KEYS, masked=m) for m in (BY_KEY, BY_QUERY)]
    found += [Form(torch.bfloat16, 64, HIDE_KEYS, biased=True), Form(torch.bfloat16, 72, HIDE_KEYS)]
    return [*found, *(Form(t, 64, NOTHING, masked=BY_BITS) for t in dtypes)]


def report(device: torch.device) -> dict[str, Any]:
    """Every form on a card: the file that `dampen doctor --gpu` writes.

    Args:
        device: the card.
    """
    import triton

    return {
        "card": card(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "forms": {str(f): verdict(device, f) or "ok" for f in forms()},
    }
