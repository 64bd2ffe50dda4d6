"""How much a file may claim before any memory is taken for it, and reading that keeps to it.

A few bytes can claim gigabytes: a compressed file, the header of an array, an image's size. Each limit is far above
what the sets hold; whoever needs more says so in the environment variable that the message names.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, cast

import numpy as np

from dampen.studies.data.errors import DamagedData

DEFAULTS = {
    "DAMPEN_MAX_FILE": 4 * 2**30,  # bytes of a file that is read whole
    "DAMPEN_MAX_CONTENT": 2 * 2**30,  # bytes that come out of one compressed file, archive member or array
    "DAMPEN_MAX_PIXELS": 100_000_000,  # of one image
    "DAMPEN_MAX_LINE": 1_000_000,  # characters of one line of parallel text, or of a table of JSON lines
}
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
BROKEN = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What the standard library raises for compressed files that are cut or changed."""


def require_within(limit: str, got: int, path: Path | str, what: str) -> None:
    """Raise where a file claims more than the limit, naming the limit and how to raise it."""
    most = int(os.environ.get(limit, DEFAULTS[limit]))
    if got > most:
        raise DamagedData(
            f"{path} claims {got} {what}, more than the limit of {most}. "
            f"It is damaged or hostile; if it is right, set {limit}={got} in the environment and run again."
        )


def read_file(path: Path) -> bytes:
    """A regular file, whole. Pipes and devices are not opened: they may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedData(f"{path} is no regular file ({stat.filemode(found.st_mode)}), so it is not read. Remove it.")
    require_within("DAMPEN_MAX_FILE", found.st_size, path, "bytes")
    return path.read_bytes()


class Limited:
    """A stream of bytes of which nobody takes too many at once; tar headers may ask for any number."""

    def __init__(self, stream: IO[bytes], path: Path):
        self.stream, self.path = stream, path

    def read(self, size: int = -1) -> bytes:
        most = int(os.environ.get("DAMPEN_MAX_CONTENT", DEFAULTS["DAMPEN_MAX_CONTENT"]))
        content = self.stream.read(most + 1 if size < 0 else min(size, most + 1))
        require_within("DAMPEN_MAX_CONTENT", len(content), self.path, "bytes of content or more")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()


def open_limited(path: Path, content: bytes | None = None) -> Limited:
    """A file, uncompressed by what its first bytes say it is (gzip, bzip2, xz, or as it is)."""
    raw = io.BytesIO(read_file(path) if content is None else content)
    opener: Any = next((o for magic, o in COMPRESSED.items() if raw.getvalue().startswith(magic)), None)
    return Limited(cast(IO[bytes], opener(raw)) if opener is not None else raw, path)


def parse_json(content: bytes, path: Path) -> Any:
    """JSON, or DamagedData that names the file, also for nesting too deep to be read."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedData(f"{path} ({len(content)} bytes) is not JSON: {error}. Fetch the file again.") from error


def parse_npy(content: bytes, path: Path | str, kinds: Collection[str] = "iuf") -> np.ndarray:
    """An array in NumPy's format over bytes that are there; only the kinds of numbers (or texts, `U`) asked for."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)  # below, numpy hands headers that it cannot read to a tokenizer
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
    except (ValueError, KeyError, EOFError, SyntaxError, TypeError, RecursionError, MemoryError, TokenError) as error:
        raise DamagedData(f"{path} ({len(content)} bytes) is damaged or truncated: {error}.") from error
    if dtype.hasobject or dtype.kind not in kinds:
        raise DamagedData(f"{path} holds an array of {dtype}, which is not read; expected kinds {', '.join(kinds)}.")
    size = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize if shape else dtype.itemsize
    if size != len(content) - stream.tell() or size < 0:
        left = len(content) - stream.tell()
        raise DamagedData(f"{path} is damaged or truncated: its array of shape {shape} has {left} of {size} bytes.")
    return np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")


def read_npz(path: Path, kinds: dict[str, str] | str) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file, each of the kinds said; or, with kinds alone, all arrays there are."""
    expected = f"Expected arrays {', '.join(kinds)}. " if isinstance(kinds, dict) else ""
    try:
        with zipfile.ZipFile(io.BytesIO(read_file(path))) as archive:
            found = {}
            if isinstance(kinds, str):
                kinds = {n.removesuffix(".npy"): kinds for n in archive.namelist() if n.endswith(".npy")}
            for name, allowed in kinds.items():
                member = archive.getinfo(f"{name}.npy")
                require_within("DAMPEN_MAX_CONTENT", member.file_size, f"{path} ({name})", "bytes")
                with archive.open(member) as file:
                    found[name] = parse_npy(file.read(member.file_size), f"{path} ({name})", allowed)
            return found
    except DamagedData:
        raise
    except (*BROKEN, KeyError, NotImplementedError, RuntimeError) as error:
        raise DamagedData(
            f"{path} ({path.stat().st_size} bytes) is damaged or truncated: {error}. "
            f"{expected}Compute or fetch the file again."
        ) from error


def read_image(path: Path, content: bytes, formats: tuple[str, ...], mode: str) -> Any:
    """A picture in one of the formats, in `mode` (RGB, L); other decoders of Pillow are not entered."""
    import warnings

    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which have a limit of their own here, and of odd metadata
            with Image.open(io.BytesIO(content), formats=formats) as file:
                require_within("DAMPEN_MAX_PIXELS", file.width * file.height, path, "pixels")
                return file.convert(mode)
    except DamagedData:
        raise
    except Exception as error:  # decoders raise all kinds for broken files
        raise DamagedData(
            f"{path} is damaged or truncated ({len(content)} bytes), or no {' or '.join(formats)}: {error}. "
            "Fetch or remove the file."
        ) from error
