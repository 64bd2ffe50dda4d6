"""What other packages and files bring: methods, models, data sets, metrics, engines and loggers beside our own.

A package says in its `pyproject.toml`, under the name that users will type:

    [project.entry-points."dampen.methods"]
    head_dropout = "mypackage.dropout:HeadDropout"

A file needs nothing: wherever a method's name is asked for, `my.py:HeadDropout` will do.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

GROUPS = ("dampen.methods", "dampen.models", "dampen.data", "dampen.metrics", "dampen.engines", "dampen.loggers")
IN_FILE = re.compile(r"(?P<file>[^:*?\"<>|]+\.py):(?P<name>[A-Za-z_]\w*)")
"""`my.py:HeadDropout`, with any path before it."""


@functools.cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """What installed packages offer in one of `GROUPS`, by name, not yet imported."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"two packages offer {point.name!r} as one of {group}: {_origin(other)} and {_origin(point)}. "
                "Uninstall one of them, or ask its author for another name."
            )
    return found


def from_packages(group: str) -> dict[str, Any]:
    """The objects that installed packages offer in a group, imported, by name."""
    return {name: _loaded(point) for name, point in entry_points(group).items()}


def is_in_file(reference: str) -> bool:
    """Whether a name is written as `my.py:HeadDropout`.

    >>> is_in_file("my.py:HeadDropout"), is_in_file("drop_key")
    (True, False)
    """
    return IN_FILE.fullmatch(reference) is not None


def from_file(reference: str) -> Any:
    """What `my.py:HeadDropout` names. A file is imported once, and anew when its text has changed."""
    match = IN_FILE.fullmatch(reference)
    if match is None:
        raise ValueError(f"expected FILE.py:NAME, such as my.py:HeadDropout, got {reference!r}.")
    path = Path(match["file"]).expanduser()
    if not path.is_file():
        raise ValueError(f"{reference}: there is no file {path} (looked in {Path.cwd()}).")
    module = _imported(path.resolve())
    if not hasattr(module, match["name"]):
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise ValueError(f"{path} has no {match['name']!r}. It has: {', '.join(public) or 'nothing public'}.")
    return getattr(module, match["name"])


def _imported(path: Path) -> Any:
    """The module of a file under a name of its own, so that copies and pickles made in this process find their class.

    Files beside it can be imported, as they can where the file is run as a script.
    """
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"dampen_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _loaded(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever a stranger's import raises, its package is named
        raise ValueError(f"{_origin(point)} cannot be imported: {type(error).__name__}: {error}") from error


def _origin(point: metadata.EntryPoint) -> str:
    package = f" of the package {point.dist.name}" if point.dist is not None else ""
    return f"{point.value}{package}"
