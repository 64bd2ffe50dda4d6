"""The hash of the result files in CITATION.cff, so that a citation names the very numbers.

    python -m reproductions.pages.citation [--check]

Anyone gets the same hash from the files alone, in the folder of the repository:

    find reproductions -path '*/results/*.json*' | LC_ALL=C sort | xargs sha256sum | sha256sum
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from reproductions.pages.publish import publish, renew

ROOT = Path(__file__).resolve().parents[2]
START, END = (
    "# result files: written by `python -m reproductions.pages.citation`",
    "# /result files",
)


def digest(root: Path) -> tuple[str, int]:
    """The hash over the hashes and paths of all result files, and how many there are."""
    paths = sorted(
        path.relative_to(root).as_posix()
        for path in root.glob("reproductions/**/results/**/*.json*")
    )
    lines = "".join(
        f"{hashlib.sha256((root / path).read_bytes()).hexdigest()}  {path}\n" for path in paths
    )
    return hashlib.sha256(lines.encode()).hexdigest(), len(paths)


def page(text: str, root: Path) -> str:
    """CITATION.cff with the hash of the result files."""
    found, count = digest(root)
    told = f'    description: "SHA-256 over the SHA-256 of the {count} result files below reproductions/"'
    lines = ["identifiers:", "  - type: other", f'    value: "sha256:{found}"', told]
    return renew(text, START, END, "\n".join(lines), "CITATION.cff")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the hash is up to date"
    )
    options = parser.parse_args(arguments)
    path = ROOT / "CITATION.cff"
    return publish({path: page(path.read_text(), ROOT)}, options.check)


if __name__ == "__main__":
    raise SystemExit(main())
