"""What packages, plug-ins and files add to dampen: methods, models, data sets, tasks, metrics and
more.

A package declares it in its `pyproject.toml`, under the name that users will type:

    [project.entry-points."dampen.methods"]
    head_dropout = "mypackage.dropout:HeadDropout"

A plug-in that is not installed calls `register` when it is imported: see `dampen.studies.plugins`.
A method in a file needs neither: wherever the name of a method is expected, `my.py:HeadDropout`
will do.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from dampen.names import nearest

GROUPS = tuple(
    f"dampen.{kind}"
    for kind in (
        *("methods", "models", "data", "transforms", "augmentations", "tasks", "metrics"),
        *("engines", "loggers", "recipes", "figures", "formulations", "diagnoses"),
    )
)
IN_FILE = re.compile(r"(?P<file>[^:*?\"<>|]+\.py):(?P<name>[A-Za-z_]\w*)")
"""`my.py:HeadDropout`, with any path before it."""


@functools.cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """What installed packages offer in one of `GROUPS`, by name, not yet imported.

    Args:
        group: one of `GROUPS`.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ValueError(
                f"two packages offer {point.name!r} as one of {group}: {_origin(other)} and "
                f"{_origin(point)}. "
                "Uninstall one of them, or request another name from its author."
            )
    return found


MOVED = {
    "dampen.data": (
        *(
            "cifar10",
            "cifar100",
            "digit_captions",
            "gtzan",
            "fsdd",
            "thumos14",
            "bccd",
            "voc",
            "coco",
        ),
        *("multi30k", "parallel", "tinyshakespeare", "text"),
    ),
    "dampen.transforms": ("noise",),
    "dampen.augmentations": ("specaugment",),
    "dampen.models": ("seq2seq", "convmixer", "cnn", "mae", "captions", "detr"),
    "dampen.diagnoses": ("robustness", "corruptions", "attention_maps"),
}
"""What was dampen's own until 0.2 and is in the folder `reproductions` of its repository now."""


def hint(group: str, name: object, known: Iterable[str]) -> str:
    """What to say of a name that a group does not have: where it moved to, the nearest name, or
    what is known.

    Args:
        group: one of `GROUPS`.
        name: the name that users type.
        known: the names the group has.

    >>> hint("dampen.models", "vitt", ["vit"])
    "; did you mean 'vit'?"
    """
    if name in MOVED.get(group, ()) and name not in (known := list(known)):
        return (
            f"; {name} is in the plug-in 'reproductions', a folder of dampen's repository. In a "
            "clone, set "
            'DAMPEN_PLUGINS=reproductions, or write plugins = ["reproductions"] at the top of the '
            "recipe"
        )
    return nearest(name, known)


_registered: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}


def register(group: str, things: Mapping[str, Any]) -> None:
    """Add things to a group by name, from a plug-in that was imported.

    Args:
        group: one of `GROUPS`.
        things: by the name that users will type, the thing itself, or where it is:
            "package.module:attribute", imported when the name is first used.
    """
    if group not in _registered:
        raise ValueError(f"unknown group {group!r}; known are {', '.join(GROUPS)}.")
    _registered[group].update(things)


def added(group: str) -> list[str]:
    """The names that packages and plug-ins add to a group; nothing is imported.

    Args:
        group: one of `GROUPS`.
    """
    return [*entry_points(group), *(n for n in _registered[group] if n not in entry_points(group))]


def references(group: str) -> dict[str, str]:
    """Where the things of a group are, as "package.module:attribute", by name; nothing is
    imported.

    Args:
        group: one of `GROUPS`.
    """
    given = {n: t for n, t in _registered[group].items() if isinstance(t, str)}
    return {**given, **{name: point.value for name, point in entry_points(group).items()}}


def load_added(group: str, name: str) -> Any:
    """The thing that a package or plug-in adds under a name, imported where it is not yet.

    Args:
        group: one of `GROUPS`.
        name: the name that users type.
    """
    if name in entry_points(group):
        return _loaded(entry_points(group)[name])
    thing = _registered[group][name]
    if isinstance(thing, str) and ":" in thing:
        module, _, attribute = thing.partition(":")
        return getattr(importlib.import_module(module), attribute)
    return thing


def from_plugins(group: str) -> dict[str, Any]:
    """Everything that packages and plug-ins add to a group, imported, by name.

    Args:
        group: one of `GROUPS`.
    """
    return {name: load_added(group, name) for name in added(group)}


T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """The things of a group by name: dampen's own, then what packages and plug-ins add, imported on
    first use.

    Args:
        group: one of `GROUPS`.
        own: dampen's own things. No plug-in replaces one of these.
        check: turns what a plug-in adds into what the group holds, or raises ValueError.
    """

    def __init__(self, group: str, own: Mapping[str, T], check: Callable[[Any], T] | None = None):
        self.group, self.own, self.check = group, own, check

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self._added():
            raise KeyError(name)
        thing = load_added(self.group, name)
        if self.check is not None:
            thing = self.check(thing)
        found: T = thing
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self._added()

    def __len__(self) -> int:
        return len(self.own) + len(self._added())

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._added()

    def _added(self) -> list[str]:
        names = added(self.group)
        if twice := sorted({*names} & {*self.own}):
            raise ValueError(
                f"a plug-in adds {twice[0]!r} to {self.group}, which "
                "dampen has itself. It needs another name."
            )
        return names


def is_in_file(reference: str) -> bool:
    """Whether a name is written as `my.py:HeadDropout`.

    Args:
        reference: as `my.py:HeadDropout`.

    >>> is_in_file("my.py:HeadDropout"), is_in_file("drop_key")
    (True, False)
    """
    return IN_FILE.fullmatch(reference) is not None


def from_file(reference: str) -> Any:
    """What `my.py:HeadDropout` names. A file is imported once, and anew when its text has
    changed.

    Args:
        reference: as `my.py:HeadDropout`.
    """
    match = IN_FILE.fullmatch(reference)
    if match is None:
        raise ValueError(f"expected FILE.py:NAME, such as my.py:HeadDropout, got {reference!r}.")
    path = Path(match["file"]).expanduser()
    if not path.is_file():
        raise ValueError(f"{reference}: there is no file {path} (looked in {Path.cwd()}).")
    module = _imported(path.resolve())
    if not hasattr(module, match["name"]):
        public = sorted(n for n in vars(module) if not n.startswith("_"))
        raise ValueError(
            f"{path} has no {match['name']!r}. It has: {', '.join(public) or 'nothing public'}."
        )
    return getattr(module, match["name"])


def _imported(path: Path) -> Any:
    """The module of a file under a name of its own, so that copies and pickles made in this process
    find their class.

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
        raise ValueError(
            f"{_origin(point)} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _origin(point: metadata.EntryPoint) -> str:
    if point.dist is not None:
        package = f" of the package {point.dist.name}"
    else:
        package = ""
    return f"{point.value}{package}"
