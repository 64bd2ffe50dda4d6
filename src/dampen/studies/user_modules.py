"""Which files a user's code is made of: a file and every module that it imports from outside Python's own places.

Imports are followed through the syntax trees, from the file's own folder and from wherever else Python would find the
module: PYTHONPATH, `sys.path.insert`, editable installs. The standard library, site-packages and dampen itself do not
count. What cannot be followed is named (`Sources.untracked`).
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dampen
from dampen.studies.errors import ConfigError

DYNAMIC = ("import_module", "__import__", "run_path", "run_module", "spec_from_file_location")
"""Calls that import what only the running program knows."""
INSTALLED = {"site-packages", "dist-packages"}
OWN = Path(dampen.__file__).resolve().parent


@dataclass
class Sources:
    """The text of each file by its path relative to the folder from which it is imported.

    `places` are those folders beside `root`, in the order in which they were needed.
    """

    root: Path
    files: dict[str, str] = field(default_factory=dict)
    places: list[Path] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)

    def outside(self) -> list[Path]:
        """The files that do not lie below the root."""
        return [path for path in self.paths.values() if not path.is_relative_to(self.root)]


def package_root(file: Path) -> Path:
    """The folder from which imports of a file are found: its own, or the one above its outermost package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def sources_of(file: Path, places: Sequence[Path | str] | None = None) -> Sources:
    """The files that a file is made of.

    Args:
        file: where to begin.
        places: the only folders, beside the file's own, in which modules are looked for; default: wherever Python
            finds them now.
    """
    root = package_root(file)
    return _followed([file.resolve()], root, places)


def sources_of_package(folder: Path) -> Sources:
    """The Python files of a package, and what they import from outside of it.

    Args:
        folder: the package; a file in it that is no Python is left out.
    """
    folder = folder.resolve()
    files = [p for p in folder.rglob("*.py") if p.is_file() and _parses(p)]
    return _followed(files, folder.parent, None)


def _parses(file: Path) -> bool:
    try:
        ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # such a file cannot be imported: a template
        return False
    return True


def _followed(files: Sequence[Path], root: Path, places: Sequence[Path | str] | None) -> Sources:
    """These files, which lie below root, and all that they import."""
    found = Sources(root)
    waiting = [(file, root) for file in files]
    while waiting:
        path, place = waiting.pop()
        name = path.relative_to(place).as_posix()
        if name not in found.files:
            found.files[name], found.paths[name] = path.read_text(encoding="utf-8"), path
            waiting += _imported(parsed(found.files[name], path), path, place, places, found)
    return found


def parsed(text: str, file: Path) -> ast.Module:
    """The syntax tree of a file; what is wrong with it is a problem of that file."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(str(file), [f"line {error.lineno}: {error.msg}"]) from error


def _imported(
    tree: ast.Module, file: Path, place: Path, places: Sequence[Path | str] | None, found: Sources
) -> Iterator[tuple[Path, Path]]:
    """The files that a file imports, each with the folder from which it is imported."""
    for base, parts in _imports(tree, file, place, found):
        if base is not None:
            yield from ((path, place) for path in _modules(base, parts))
            continue
        own = (found.root, place)
        source = next((folder for folder in own if _holds(folder, parts[0])), None)
        source = source or _place_of(parts[0], places, found)
        # A package without __init__.py is one only where there is no other.
        source = source or next((f for f in own if (f / parts[0]).is_dir()), None)
        if source is not None:
            if source not in (found.root, *found.places):
                found.places.append(source)
            yield from ((path, source) for path in _modules(source, parts))


def _imports(
    tree: ast.Module, file: Path, place: Path, found: Sources
) -> Iterator[tuple[Path | None, list[str]]]:
    """Every import as its dotted name; a relative one with the folder that it starts from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = file.parent if node.level else None
            for _ in range(node.level - 1):
                base = base.parent if base is not None and base != place else base
            parts = node.module.split(".") if node.module else []
            yield from ((base, [*parts, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called not in DYNAMIC:
                continue
            (first, *_) = [*node.args, None]
            named = first.value if isinstance(first, ast.Constant) else None
            if called in DYNAMIC[:2] and isinstance(named, str) and not named.startswith("."):
                yield None, named.split(".")
                continue
            problem = (
                f"{file.name}, line {node.lineno}: {called}({ast.unparse(first) if first else ''})"
            )
            if problem not in found.untracked:
                found.untracked.append(problem)


def _holds(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _modules(base: Path, parts: list[str]) -> Iterator[Path]:
    """`a.b.c` below `base`: the packages on the way and the module, as far as there are such files."""
    if (base / "__init__.py").is_file():
        yield base / "__init__.py"
    for i in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:i])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def _place_of(name: str, places: Sequence[Path | str] | None, found: Sources) -> Path | None:
    """The folder from which a module is imported that is not beside the file; None where it is not the user's own."""
    if name in sys.stdlib_module_names or name == OWN.name:
        return None
    if places is not None:
        return next((p for p in map(Path, places) if _holds(p, name) or (p / name).is_dir()), None)
    for path in _locations(name):
        if not is_users(path):
            continue
        if path.suffix == ".py":
            package = path.name == "__init__.py"
            return (path.parent.parent if package else path.parent).resolve()
        if path.is_dir():  # a package without __init__.py
            return path.parent.resolve()
        told = f"{name} ({path.name}, compiled)"
        if told not in found.untracked:
            found.untracked.append(told)
    return None


def _locations(name: str) -> list[Path]:
    """Where Python would import a top-level module from; it is not imported for that."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module without a spec, such as __main__
        file = getattr(sys.modules.get(name), "__file__", None)
        return [Path(file)] if file else []
    if spec is None:
        return []
    if spec.origin is None or not Path(spec.origin).is_file():
        return [Path(p) for p in spec.submodule_search_locations or ()]
    return [Path(spec.origin)]


def is_users(path: Path) -> bool:
    """Whether a module's file is the user's own: not of Python, not installed, not dampen's.

    Args:
        path: of the file.
    """
    path = path.resolve()
    if INSTALLED & set(path.parts) or path.is_relative_to(OWN):
        return False
    library = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")]
    return not any(path.is_relative_to(folder) for folder in library)
