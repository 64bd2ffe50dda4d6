"""Find the files of a set, and hash them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dampen.studies.data.dataset import DataSpec
from dampen.studies.data.errors import MissingData

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


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def joint_sha256(hashes: dict[str, str]) -> str:
    """One hash for many files: that of the sorted lines 'hash  name', as `sha256sum * | sha256sum` would give."""
    return sha256("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode())
