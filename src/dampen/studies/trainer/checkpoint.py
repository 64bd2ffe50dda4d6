"""States on disk: written atomically, named by their checksum; two are kept in case one is damaged.

A run that resumes keeps the kernels it began on, torch's or the native ones: the two draw different
random numbers, and changed halfway a run would be neither the one nor the other.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.native import library
from dampen.studies.errors import DamagedRecord, LabError
from dampen.studies.files import atomic_file
from dampen.studies.run import Run
from dampen.studies.store import RunStore

NUMPY: list[Any] = [
    np.array(0.0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    bytes,  # of an empty array
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDG"},
]
"""How numpy's numbers and arrays are read back: they hold bytes, and run no code."""
_NAME = re.compile(r"-(\d+)-([0-9a-f]{16})\.(pt|safetensors)$")


def save_state(folder: Path, kind: str, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `kind-STEP-CHECKSUM.pt` and remove all but the newest `keep` of that kind."""
    # torch's own writer of zip files hides that the disk is full: it gets memory, and the file gets
    # plain bytes
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return _write(folder, kind, step, buffer.getbuffer(), "pt", keep)


def save_weights(folder: Path, kind: str, step: int, weights: dict[str, Tensor]) -> Path:
    """Write `kind-STEP-CHECKSUM.safetensors`, which anyone can read, and remove older ones of that
    kind.
    """
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    return _write(folder, kind, step, save(whole, {"step": str(step)}), "safetensors", keep=1)


def _write(
    folder: Path, kind: str, step: int, content: bytes | memoryview, suffix: str, keep: int
) -> Path:
    digest = hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"{kind}-{step:08d}-{digest}.{suffix}"
    with atomic_file(path) as file:
        file.write(content)
    for old in saved_states(folder, kind)[keep:]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def saved_states(folder: Path, kind: str) -> list[Path]:
    """The states of that kind, newest first."""
    found = [p for p in folder.glob(f"{kind}-*") if _NAME.search(p.name)]
    return sorted(found, key=_step, reverse=True)


def load_newest(folder: Path, kind: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest state that is whole, and in words what is wrong with the newer ones."""
    damage: list[str] = []
    for path in saved_states(folder, kind):
        try:
            return load_state(path), damage
        except ValueError as error:
            damage.append(str(error))
    return None, damage


def load_state(path: Path) -> dict[str, Any]:
    """Read a state, refusing one whose bytes do not match the checksum in its name."""
    match = _NAME.search(path.name)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:16]
    if match is None or digest != match[2]:
        raise ValueError(
            f"{path} is damaged: its checksum is {digest}, its name says "
            f"{match[2] if match else 'nothing'}."
        )
    if match[3] == "safetensors":
        from safetensors.torch import load

        return {"model": load(content), "step": int(match[1])}
    try:
        state: dict[str, Any] = _read(io.BytesIO(content))
    except pickle.UnpicklingError as error:  # written before `check_readable` was there
        raise ValueError(f"{path} cannot be read: {error}.") from error
    return state


def _read(file: io.BytesIO) -> Any:
    """The content of a state. Plain data, tensors and numpy's numbers and arrays; nothing that runs
    code.
    """
    with torch.serialization.safe_globals(NUMPY):
        return torch.load(file, weights_only=True, map_location="cpu")


def check_readable(state: Any, name: str) -> None:
    """Raise TypeError where a state could be written but never read again, naming the place.

    Args:
        state: what the user wants to save.
        name: of the state in the message.
    """
    problem = _unreadable(state)
    if not problem:
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(state, dict) and type(state).__module__ in ("builtins", "collections"):
        parts = [(f"{name}[{key!r}]", value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        parts = [(f"{name}[{i}]", value) for i, value in enumerate(state)]
    for inner, value in parts:
        check_readable(value, inner)
    raise TypeError(
        f"trial.checkpoint: {name} is a {type(state).__name__}, which a checkpoint could not read "
        "back. Save dicts, lists, numbers, strings, tensors and numpy arrays: dict(x) of a "
        "defaultdict, str(x) of a Path, x.state_dict() of an object."
    )


def _unreadable(state: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        _read(buffer)
    except (pickle.PickleError, AttributeError, TypeError):  # what pickle raises for local objects
        return True
    return False


def _step(path: Path) -> int:
    match = _NAME.search(path.name)
    return int(match[1]) if match else -1


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator, as data that a weights-only load accepts."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every random generator back."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def fingerprint(state: dict[str, torch.Tensor]) -> str:
    """A checksum of weights: equal if and only if they are equal bit for bit (up to collisions)."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(
            tensor.view(torch.uint8).numpy().tobytes()
            if tensor.ndim
            else tensor.reshape(1).view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


Train = Callable[..., dict[str, Any]]


def keeps_kernels(train: Train) -> Train:
    """Let a way of training, `train(trial, folder, ...)`, run on the kernels that the folder's
    trial began on.

    The two draw from different streams: changed halfway, a trial would be neither the one nor the
    other."""

    @wraps(train)
    def kept(trial: Run, folder: Path, *rest: Any) -> dict[str, Any]:
        before = kernels_before(folder)
        if not trial.methods or before in (
            "",
            library.path(),
        ):  # a model without methods uses neither
            return train(trial, folder, *rest)
        if before == "torch":
            with library.torch_only("this trial began on torch's kernels and keeps to them"):
                return train(trial, folder, *rest)
        raise LabError(
            f"The trial in {folder} began on the native kernels, which are not at hand now "
            f"({library.status()}). "
            "Build them with `dampen doctor --build`, or delete the folder to begin the trial anew."
        )

    return kept


def kernels_before(folder: Path) -> str:
    """The path that an unfinished trial was on; '' where it has no checkpoint to resume from, or is
    too old to say.
    """
    if not saved_states(folder, "checkpoint"):
        return ""
    try:
        sessions = RunStore(folder).sessions()
    except DamagedRecord:  # the checkpoint knows it too
        sessions = [load_newest(folder, "checkpoint")[0] or {}]
    return str(sessions[-1].get("kernels") or "") if sessions else ""
