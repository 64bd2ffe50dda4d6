"""Compile the kernels, keep them for this machine, and load them when they are there.

`kernels.cpp` and the headers beside it include none of torch: they take raw pointers and are called through ctypes. So
they compile in seconds with any C++ compiler, and the matrix products are those of the library that torch brings.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dampen.native.machine import cache_folder, machine_key

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")

_library: ctypes.CDLL | None = None
_why_not = ""  # why there is none, once that is known
_looked = False


class BuildError(RuntimeError):
    """The kernels could not be built; everything runs on torch alone."""


def sources() -> list[Path]:
    """What is compiled: a change in any of these is another library."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def library_path() -> Path:
    """Where the compiled kernels of this source, processor and torch are kept."""
    key = json.dumps([machine_key(), _flags(), *(path.read_text() for path in sources())], sort_keys=True)
    return cache_folder() / f"native-{hashlib.sha256(key.encode()).hexdigest()[:12]}.so"


def build(again: bool = False) -> Path:
    """Compile the kernels unless they are there, and use them from now on; `BuildError` in one line if that fails."""
    path = library_path()
    if again or not path.exists():
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise BuildError(
                "no C++ compiler was found (g++, clang++, or what CXX names). Install one and build again."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *_flags(), str(SOURCE), "-o", str(made)]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=600)
            except OSError as error:
                raise BuildError(f"{compiler} could not be run: {error}.") from error
            if result.returncode != 0:
                said = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[-300:])
                raise BuildError(f"{Path(compiler).name} failed: {said.strip()}")
            os.replace(made, path)  # there whole, or not at all: other processes may be looking
    reset()
    if not available():
        raise BuildError(status())
    return path


def available() -> bool:
    """Whether the kernels are there and switched on. The file is looked for once, and never inside a graph."""
    if not _looked and not torch.compiler.is_compiling():
        _look()
    return _library is not None


def path() -> str:
    """ "native" where the kernels are in use, else "torch": records name it, and runs are paired within one."""
    return "native" if available() else "torch"


@contextmanager
def torch_only(why: str) -> Iterator[None]:
    """Inside, everything runs on torch alone, as if nothing had been built; `status` says why."""
    global _library, _why_not
    available()  # so that nobody looks inside
    before = _library, _why_not
    _library, _why_not = None, why
    try:
        yield
    finally:
        _library, _why_not = before


def status() -> str:
    """One line for people: which kernels run, or why not."""
    return f"native kernels in use ({library_path().name})" if available() else f"native kernels off: {_why_not}"


def library() -> ctypes.CDLL:
    """The loaded kernels."""
    if not available() or _library is None:
        raise RuntimeError(f"dampen's {status()}. Build them with `dampen doctor --build`.")
    return _library


def _flags() -> list[str]:
    """The compiler's flags, and those of $DAMPEN_NATIVE_FLAGS, as in "-fsanitize=address"."""
    return [*FLAGS, *os.environ.get("DAMPEN_NATIVE_FLAGS", "").split()]


def reset() -> None:
    """Look again, after the environment or the cache has changed."""
    global _library, _looked, _why_not
    _library, _looked, _why_not = None, False, ""


def _look() -> None:
    global _library, _looked, _why_not
    _looked = True
    if os.environ.get("DAMPEN_NATIVE", "1") == "0":
        _why_not = "DAMPEN_NATIVE=0"
        return
    folder = cache_folder()
    if not folder.is_dir() or not any(folder.glob("native-*.so")) or not (path := library_path()).exists():
        _why_not = "not built for this processor and torch (dampen doctor --build)"
        return
    try:
        gemm = _torch_gemm()
        loaded = ctypes.CDLL(str(path))
        loaded.dampen_start(gemm)
        _declare(loaded)
    except (OSError, AttributeError) as error:
        _why_not = f"{path.name} does not load ({error})"
        return
    _library = loaded


def _torch_gemm() -> ctypes.c_void_p:
    """The address of the single-precision matrix product in torch's own library."""
    folder = Path(torch.__file__).parent / "lib"
    name = next((folder / n for n in ("libtorch_cpu.so", "libtorch_cpu.dylib") if (folder / n).exists()), None)
    if name is None:
        raise OSError(f"no libtorch_cpu in {folder.name}")
    return ctypes.cast(ctypes.CDLL(str(name)).sgemm_, ctypes.c_void_p)


def _declare(loaded: ctypes.CDLL) -> None:
    i64, u64, f64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
    arguments = {
        "dampen_attention": [pointer],
        "dampen_attention_backward": [pointer],
        "dampen_taps": [pointer, i64],
        "dampen_taps_backward": [pointer, i64],
        "dampen_dropout": [pointer, pointer, i64, f64, u64, i64],
        "dampen_factors": [pointer, i64, f64, u64],
        "dampen_mask": [pointer, i64, i64, i64, f64, u64],
        "dampen_draws": [pointer, i64, u64, i64, u64],
    }
    for name, types in arguments.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
