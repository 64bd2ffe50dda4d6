"""The tested environment, written down: `python -m benchmarks.environment` writes constraints.txt and docs/licences.md.

`--lowest` prints the lowest version that pyproject.toml declares of each requirement, as constraints for `make lowest`;
what declares none stands there as it was tested.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("dampen",)
TORCH = ("torch", "torchvision")  # the two that pip must not replace by builds of several gigabytes
HEAD = """# The environment that the tests were run in, written by `python -m benchmarks.environment`.
# pip install -c constraints.txt takes these versions, and keeps pip from replacing torch by a CUDA build of several GB.
"""


def installed() -> dict[str, metadata.Distribution]:
    """Every distribution of this environment but our own and pip's, by its normalized name."""
    found = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d for d in metadata.distributions()
    }
    return {n: found[n] for n in sorted(found) if n not in (*OWN, "pip", "setuptools", "wheel")}


def constraints() -> str:
    """One line per distribution; a local version such as +cpu names a build, not a version, and is left out."""
    return HEAD + "".join(
        f"{name}=={d.version.partition('+')[0]}\n" for name, d in installed().items()
    )


def licence(dist: metadata.Distribution) -> str:
    """What a distribution says of its licence: the expression, else the classifier, else the first line of the text."""
    said = dist.metadata.get("License-Expression")
    classified = [
        c.rpartition(" :: ")[2]
        for c in dist.metadata.get_all("Classifier") or []
        if c.startswith("License")
    ]
    text = (dist.metadata.get("License") or "").strip().splitlines()
    return (
        said
        or ", ".join(c for c in classified if c != "OSI Approved")
        or (text[0][:60] if text else "not said")
    )


def licences() -> str:
    """The page."""
    direct = {name for name, _ in requirements()}
    lines = [
        "# Licences",
        "",
        "dampen itself is under Apache-2.0. This is what it stands on in the environment that is tested, as each",
        "package says it of itself; those in bold are required directly by dampen or one of its extras, the others by",
        "those. Nothing of them is copied into this repository. Written by `python -m benchmarks.environment`.",
        "",
        "| package | version | licence |",
        "|---|---|---|",
    ]
    for name, dist in installed().items():
        shown = f"**{name}**" if name in direct else name
        lines.append(
            f"| {shown} | {dist.version.partition('+')[0]} | {licence(dist).replace('|', '/')} |"
        )
    return "\n".join(lines) + "\n"


def requirements() -> list[tuple[str, str]]:
    """(name, lowest version or nothing) of everything that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    found = {}
    for requirement in said:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", requirement)
        if match and match[1] not in OWN:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2] or ""
    return sorted(found.items())


def lowest() -> str:
    """Constraints at the lowest declared versions; torch, torchvision and what declares none at the tested ones: left
    free, pip would look through years of their versions for one that fits."""
    tested = {
        name: metadata.version(name).partition("+")[0] for name, low in requirements() if not low
    }
    tested |= {name: metadata.version(name).partition("+")[0] for name in TORCH}
    return "".join(f"{name}=={tested.get(name, low)}\n" for name, low in requirements())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lowest", action="store_true", help="print constraints at the lowest declared versions"
    )
    if parser.parse_args().lowest:
        print(lowest(), end="")
        return
    (ROOT / "constraints.txt").write_text(constraints(), encoding="utf-8")
    (ROOT / "docs" / "licences.md").write_text(licences(), encoding="utf-8")


if __name__ == "__main__":
    main()
