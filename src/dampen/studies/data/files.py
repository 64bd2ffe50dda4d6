"""Find the files of a dataset, hash them, and read them without trusting what they claim.

A few bytes can claim gigabytes: a compressed file, the header of an array, the size of an image.
Each limit is far above what real datasets need. The error names the environment variable that
raises it."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import stat
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from dampen.studies.data.dataset import DamagedData, DataSpec, MissingData

ENVIRONMENT = "DAMPEN_DATA"
DEFAULTS = {
    "DAMPEN_MAX_FILE": 4 * 2**30,  # bytes of a file that is read whole
    "DAMPEN_MAX_CONTENT": 2 * 2**30,  # bytes out of one compressed file, archive member or array
    "DAMPEN_MAX_PIXELS": 100_000_000,  # of one image
    "DAMPEN_MAX_LINE": 1_000_000,  # characters of one line of text, or of a table of JSON lines
}
BROKEN = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What the standard library raises for compressed files that are truncated or changed."""


def search_path(data_dir: str | Path | None = None) -> list[Path]:
    """Where datasets are looked for: `data_dir`, else $DAMPEN_DATA, then ~/.cache/dampen/data.

    Args:
        data_dir: a folder given by the user; nothing else is searched then.
    """
    if data_dir is not None:
        return [Path(data_dir).expanduser()]
    named = [Path(os.environ[ENVIRONMENT]).expanduser()] if os.environ.get(ENVIRONMENT) else []
    return [*named, Path.home() / ".cache" / "dampen" / "data"]


def places_below(roots: Iterable[Path], candidates: Iterable[str]) -> list[Path]:
    """The places where a dataset may be: each folder itself, then the usual names below it.

    Args:
        roots: the searched folders.
        candidates: usual names of the dataset's own folder.
    """
    return [path for root in roots for path in (root, *(root / name for name in candidates))]


def find(
    spec: DataSpec,
    data_dir: str | Path | None,
    candidates: Iterable[str],
    holds: Callable[[Path], bool],
) -> Path:
    """The first place that holds the dataset.

    Args:
        spec: the dataset.
        data_dir: as for `search_path`.
        candidates: usual names below a searched folder.
        holds: whether a path holds the dataset.
    """
    searched = places_below(search_path(data_dir), candidates)
    for path in searched:
        if path.exists() and holds(path):
            return path
    places = "\n".join(f"  {path}" for path in searched)
    raise MissingData(
        f"The dataset {spec.name} was not found. Searched:\n{places}\n"
        f"Expected layout: {spec.layout}\nWhere to get it: {spec.where}\n"
        f"Then pass data_dir= (--data-dir), or set {ENVIRONMENT} to the folder."
    )


def sha256(content: bytes) -> str:
    """The hash of some bytes.

    Args:
        content: the bytes.
    """
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """The hash of a file.

    Args:
        path: the file.
    """
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def joint_sha256(hashes: dict[str, str]) -> str:
    """One hash for many files: that of the sorted lines 'hash  name'.

    Args:
        hashes: the hash of each file by its name, as `sha256sum *` lists them.
    """
    return sha256("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode())


def limit_of(name: str) -> int:
    """A limit: the environment variable of that name, or its default.

    Args:
        name: one of `DEFAULTS`.
    """
    return int(os.environ.get(name, DEFAULTS[name]))


def require_within(limit: str, got: int, path: Path | str, what: str) -> None:
    """Raise where a file claims more than a limit.

    Args:
        limit: one of `DEFAULTS`, an environment variable that overrides it.
        got: how much is claimed.
        path: the file.
        what: the unit, in words.
    """
    most = limit_of(limit)
    if got > most:
        raise DamagedData(
            f"{path} claims {got} {what}, more than the limit of {most}. It is damaged or hostile; "
            f"if it is right, set {limit}={got} in the environment and run again."
        )


def read_file(path: Path) -> bytes:
    """The content of a regular file. Pipes and devices may never end, so they raise.

    Args:
        path: the file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedData(
            f"{path} is no regular file ({stat.filemode(found.st_mode)}), so it is not read. "
            "Remove it."
        )
    require_within("DAMPEN_MAX_FILE", found.st_size, path, "bytes")
    return path.read_bytes()


def parse_npy(content: bytes, path: Path | str, kinds: Collection[str] = "iuf") -> np.ndarray:
    """An array in NumPy's format. Nothing is allocated for what the header claims.

    Args:
        content: the bytes.
        path: where they come from, for errors.
        kinds: the accepted kinds of numbers (`U` for text), as in `dtype.kind`.
    """
    stream = io.BytesIO(content)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    # numpy passes headers that it cannot read to a Python tokenizer, which raises all of these.
    broken = (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError, MemoryError)
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran, dtype = read_header[version](stream)
    except (*broken, TokenError) as error:
        raise DamagedData(
            f"{path} ({len(content)} bytes) is damaged or truncated: {error}."
        ) from error
    if dtype.hasobject or dtype.kind not in kinds:
        raise DamagedData(
            f"{path} holds an array of {dtype}, which is not read; expected kinds "
            f"{', '.join(kinds)}."
        )
    # Python's integers, because a hostile shape overflows numpy's.
    size = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
    left = len(content) - stream.tell()
    if size != left or size < 0:
        raise DamagedData(
            f"{path} is damaged or truncated: its array of shape {shape} has {left} of {size} "
            "bytes."
        )
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def read_npz(path: Path, kinds: dict[str, str] | str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Args:
        path: the file.
        kinds: the accepted kinds of each expected array; or one text for all arrays there are.
    """
    expected = f"Expected arrays {', '.join(kinds)}. " if isinstance(kinds, dict) else ""
    try:
        with zipfile.ZipFile(io.BytesIO(read_file(path))) as archive:
            found = {}
            if isinstance(kinds, str):
                names = [n for n in archive.namelist() if n.endswith(".npy")]
                kinds = {name.removesuffix(".npy"): kinds for name in names}
            for name, allowed in kinds.items():
                member, where = archive.getinfo(f"{name}.npy"), f"{path} ({name})"
                require_within("DAMPEN_MAX_CONTENT", member.file_size, where, "bytes")
                with archive.open(member) as file:
                    found[name] = parse_npy(file.read(member.file_size), where, allowed)
            return found
    except DamagedData:
        raise
    except (*BROKEN, KeyError, NotImplementedError, RuntimeError) as error:
        raise DamagedData(
            f"{path} ({path.stat().st_size} bytes) is damaged or truncated: {error}. "
            f"{expected}Compute or fetch the file again."
        ) from error


def read_image(path: Path, content: bytes, formats: tuple[str, ...], mode: str) -> Any:
    """A picture by Pillow; decoders of other formats are not entered.

    Args:
        path: where it comes from, for errors.
        content: the bytes.
        formats: the accepted formats, as Pillow names them.
        mode: what it is converted to, such as RGB or L.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, limited below, and about odd metadata
            with Image.open(io.BytesIO(content), formats=formats) as file:
                require_within("DAMPEN_MAX_PIXELS", file.width * file.height, path, "pixels")
                return file.convert(mode)
    except DamagedData:
        raise
    except Exception as error:  # decoders raise anything for broken files
        raise DamagedData(
            f"{path} is damaged or truncated ({len(content)} bytes), or no "
            f"{' or '.join(formats)}: {error}. Fetch or remove the file."
        ) from error
