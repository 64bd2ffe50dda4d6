"""Compile the kernels, keep them for this machine, and load them when they are there.

`kernels.cpp` and the headers beside it include none of torch: they take raw pointers and are called
through ctypes. So they compile in seconds with any C++ compiler, and the matrix products are those
of the library that torch brings.

A library is tried in a process of its own before it is kept, written whole or not at all, and ends
with a checksum that is looked at before it is loaded: a file that was cut, or whose blocks are
zeros, would end the process that calls it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dampen._torch import run_by_the_tracer

# --- which machine this is


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


# --- the library

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
COMPILE_WITHIN = 600.0  # seconds
# ends a library, with the checksum of all before it
MARK = b"\ndampen native kernels, sha256 "

# Loads a library as `_look` does, without torch, and compares the first draws under seed 0 with
# Random123's vector. A compiler may write what loads and then dies of an instruction that this
# processor has not.
_TRIAL = """
import ctypes, sys
kernels = ctypes.CDLL(sys.argv[1])
kernels.dampen_start.restype = kernels.dampen_draws.restype = ctypes.c_char_p
lacks = kernels.dampen_start(None)
if lacks:
    sys.exit(lacks.decode())
i64, u64 = ctypes.c_int64, ctypes.c_uint64
draws = (ctypes.c_uint16 * 128)()
refused = kernels.dampen_draws(draws, i64(128), i64(128), u64(0), i64(0), u64(0))
known = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]
if refused or [draws[16 * i] for i in range(8)] != known:
    sys.exit("it draws wrong random numbers")
"""

loaded: ctypes.CDLL | None = None
"""The kernels; None where there are none, or nobody has looked yet (`looked`)."""
# why there is none, once that is known
_why_not = ""
looked = False


class BuildError(RuntimeError):
    """The kernels could not be built; everything runs on torch alone."""


def sources() -> list[Path]:
    """What is compiled: a change in any of these is another library."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def library_path() -> Path:
    """Where the compiled kernels of this source, torch, compiler's flags and processor's
    instructions are kept.

    -march=native uses what the processor offers, so that is in the key: its model's name says
    little about it, least of all in a virtual machine. What the compiler made of it, the library
    itself compares with the processor when it is loaded (`dampen_start`)."""
    key = json.dumps(
        [torch.__version__, instruction_sets(), _flags(), *(path.read_text() for path in sources())]
    )
    return cache_folder() / f"native-{hashlib.sha256(key.encode()).hexdigest()[:12]}.so"


def build(again: bool = False) -> Path:
    """Compile the kernels unless they are there, and use them from now on; `BuildError` in one line
    if that fails."""
    path = library_path()
    try:
        if again or not path.exists() or damage(path):
            _compile(path)
    except OSError as error:
        raise BuildError(
            f"the cache folder {path.parent} cannot be used ({_plainly(error)})."
        ) from error
    reset()
    if not available() and os.environ.get("DAMPEN_NATIVE", "1") != "0":
        raise BuildError(status())
    return path


def _compile(path: Path) -> None:
    """Compile into a folder beside `path`, try what came out, and put it there whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run_compiler([*_compiler(), *_flags(), str(SOURCE), "-o", str(made)])
        if not made.is_file() or not made.stat().st_size:
            raise BuildError(f"{_compiler()[0]} ended without an error and wrote nothing.")
        _try_out(made)
        with open(made, "r+b") as file:
            content = file.read()
            file.write(MARK + hashlib.sha256(content).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        # there whole, or not at all: other processes may be looking
        os.replace(made, path)
        _sync_folder(path.parent)


def _compiler() -> list[str]:
    """The compiler and its first arguments: $CXX, which may be "ccache g++", or what is found."""
    said = os.environ.get("CXX", "")
    try:
        command = shlex.split(said)
    except ValueError as error:
        raise BuildError(f"CXX={said!r} is no command ({error}).") from error
    found = command or [name for name in (shutil.which("g++"), shutil.which("clang++")) if name][:1]
    if not found:
        raise BuildError(
            "no C++ compiler was found (g++, clang++, or what CXX names). Install one and build "
            "again."
        )
    return found


def _run_compiler(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        result = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_WITHIN
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name} was not done after {COMPILE_WITHIN:g} s.") from error
    except OSError as error:
        raise BuildError(f"{name} could not be run ({_plainly(error)}).") from error
    if result.returncode < 0:
        raise BuildError(f"{name} was ended by signal {-result.returncode}.")
    if result.returncode:
        lines = _readable(result.stderr).strip().splitlines() or [
            f"exit code {result.returncode}, and no word"
        ]
        shown = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"{name} failed: {shown.strip()[:300]}")


def _try_out(made: Path) -> None:
    """Load the library and draw numbers with it, in a process of its own."""
    command = [sys.executable, "-S", "-c", _TRIAL, str(made)]
    try:
        result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except subprocess.TimeoutExpired as error:
        raise BuildError("what was compiled does not come to an end when it is tried.") from error
    if result.returncode:
        lines = _readable(result.stderr).strip().splitlines()
        why = (
            f"signal {-result.returncode}"
            if result.returncode < 0
            else lines[-1]
            if lines
            else "no word"
        )
        raise BuildError(f"what was compiled does not work ({why[:300]}).")


def _readable(text: bytes) -> str:
    """What a compiler said, in letters that any terminal can print."""
    return text.decode("utf-8", "replace").encode("ascii", "backslashreplace").decode()


def _plainly(error: OSError) -> str:
    return _readable((error.strerror or str(error)).encode("utf-8", "replace"))


def _sync_folder(folder: Path) -> None:
    """Have the folder's new entry written too, where folders can be opened."""
    if os.name == "nt":
        return
    at = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)


def damage(path: Path) -> str:
    """What is wrong with a library that was kept, "" if it is as it was written."""
    content = path.read_bytes()
    body, mark, checksum = content.rpartition(MARK)
    if not mark:
        return "its end is missing"
    if hashlib.sha256(body).hexdigest().encode() == checksum:
        return ""
    return "its checksum differs"


def available() -> bool:
    """Whether the kernels are there and switched on. The file is looked for once, at the latest
    when a graph is traced: a process that compiles first draws what one draws that ran eagerly
    first."""
    if not looked:
        _look_while_tracing() if torch.compiler.is_compiling() else _look()
    return loaded is not None


def use_native_kernels() -> None:
    """Decide now, before any graph is traced, whether the kernels run, and declare their
    operators."""
    if available():
        from dampen.native import ops  # noqa: F401 - torch knows the operators from here on


def path() -> str:
    """The kernel path that result files name: "native" where the kernels are in use, else "torch".

    Runs are compared within one path only.
    """
    if available():
        return "native"
    return "torch"


@contextmanager
def torch_only(why: str) -> Iterator[None]:
    """Inside, everything runs on torch alone, as if nothing had been built; `status` says why."""
    global loaded, _why_not
    available()  # so that nobody looks inside
    before = loaded, _why_not
    loaded, _why_not = None, why
    try:
        yield
    finally:
        loaded, _why_not = before


def status() -> str:
    """One line for people: which kernels run, or why not."""
    if available():
        return f"native kernels in use ({library_path().name})"
    return f"native kernels off: {_why_not}"


def library() -> ctypes.CDLL:
    """The loaded kernels."""
    if loaded is None:
        available()  # looks, once
    if loaded is None:
        raise RuntimeError(f"dampen's {status()}. Build them with `dampen doctor --build`.")
    return loaded


def _flags() -> list[str]:
    """The compiler's flags, and those of $DAMPEN_NATIVE_FLAGS, as in "-fsanitize=address"."""
    return [*FLAGS, *os.environ.get("DAMPEN_NATIVE_FLAGS", "").split()]


def reset() -> None:
    """Look again, after the environment or the cache has changed."""
    global loaded, looked, _why_not
    loaded, looked, _why_not = None, False, ""


def _look() -> None:
    global loaded, looked, _why_not
    looked = True
    if os.environ.get("DAMPEN_NATIVE", "1") == "0":
        _why_not = "DAMPEN_NATIVE=0"
        return
    folder = cache_folder()
    try:
        if (
            not folder.is_dir()
            or not any(folder.glob("native-*.so"))
            or not (path := library_path()).exists()
        ):
            _why_not = "not built for this processor and torch (dampen doctor --build)"
            return
        if wrong := damage(path):
            _why_not = f"{path.name} is damaged ({wrong}); dampen doctor --build builds it again"
            print(
                f"dampen: the native kernels in {path} are "
                f"damaged ({wrong}), so torch's kernels run. "
                "To build them again: dampen doctor --build",
                file=sys.stderr,
            )
            return
        gemm = _torch_gemm()
        found = ctypes.CDLL(str(path))
        _declare(found)
        if lacks := found.dampen_start(gemm):
            _why_not = f"{path.name} was built for another processor ({lacks.decode()})"
            return
    except (OSError, AttributeError) as error:
        shown = _readable(str(error).encode("utf-8", "replace"))
        _why_not = f"the kernels in {folder} do not load ({shown})"
        return
    loaded = found


@run_by_the_tracer
def _look_while_tracing() -> bool:
    """`_look`, run by the tracer itself: what it finds holds for the whole process."""
    _look()
    return loaded is not None


def _torch_gemm() -> ctypes.c_void_p:
    """The address of the single-precision matrix product in torch's own library."""
    folder = Path(torch.__file__).parent / "lib"
    name = next(
        (folder / n for n in ("libtorch_cpu.so", "libtorch_cpu.dylib") if (folder / n).exists()),
        None,
    )
    if name is None:
        raise OSError(f"no libtorch_cpu in {folder.name}")
    return ctypes.cast(ctypes.CDLL(str(name)).sgemm_, ctypes.c_void_p)


def _declare(kernels: ctypes.CDLL) -> None:
    i64, u64, f64, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
    # an address, and the room from there on
    memory = [pointer, i64]
    arguments = {
        "dampen_start": [pointer],
        "dampen_attention": [pointer],
        "dampen_attention_backward": [pointer],
        "dampen_kept": [pointer, *memory],
        "dampen_taps": [pointer, i64],
        "dampen_taps_backward": [pointer, i64],
        "dampen_dropout": [*memory, *memory, i64, f64, u64, i64],
        "dampen_factors": [*memory, i64, f64, u64],
        "dampen_mask": [*memory, i64, i64, i64, f64, u64],
        "dampen_draws": [*memory, i64, u64, i64, u64],
    }
    for name, types in arguments.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = types, ctypes.c_char_p  # null, or what is refused
