"""The identity of a user's code: a hash of the syntax trees of a file and of the
user's files that it imports.

`user_modules.py` says which files these are. Until 0.2 only those below the file's own folder
counted: where others are imported, `Code.earlier` is the hash that older records have. Comments,
layout and docstrings do not count, nor does the part of a script that only starts the comparison. A
function typed into a notebook has no file: there the sources of all that it reaches count instead.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import dampen
from dampen.studies.errors import ConfigError

# --- the files of a user's code
#
# Which files a user's code is made of: a file and every module that it imports from outside
# Python's own places.
#
# Imports are followed through the syntax trees, from the file's own folder and from wherever
# else Python would find the module: PYTHONPATH, `sys.path.insert`, editable installs. The
# standard library, site-packages and dampen itself do not count. What cannot be followed is
# named (`Sources.untracked`).

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
    """The folder from which imports of a file are found: its own, or the one above
    its outermost package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def sources_of(file: Path, places: Sequence[Path | str] | None = None) -> Sources:
    """The files that a file is made of.

    Args:
        file: where to begin.
        places: the only folders, beside the file's own, in which modules are looked for; default:
            wherever Python finds them now.
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
    """`a.b.c` below `base`: the packages on the way and the module, as far as
    there are such files."""
    if (base / "__init__.py").is_file():
        yield base / "__init__.py"
    for i in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:i])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def _place_of(name: str, places: Sequence[Path | str] | None, found: Sources) -> Path | None:
    """The folder from which a module is imported that is not beside the file; None where it is not
    the user's own."""
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


# --- their identity


@dataclass(frozen=True)
class Code:
    """A function's name for people, the hash of its code, and the files it is made of, relative to
    `root` or to one of `places`."""

    name: str
    digest: str
    root: Path | None = None
    files: dict[str, str] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()  # what it imports and nobody can follow, in words
    outside: tuple[Path, ...] = ()  # its files that do not lie below the root
    earlier: str = ""  # the hash by the rule of 0.2, where that is another


def code_of(function: Callable[..., Any]) -> Code:
    """The code of a function, a method, a `functools.partial` or an object with `__call__`.

    Args:
        function: the user's training function, or what else they call.
    """
    inner, bound = _unwrapped(function)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    file = _file(inner)
    if file is None:
        facts = "\n".join(sorted(set(_reachable(inner, set()))))
        return Code(f"notebook:{name}", _sha(facts + bound))
    return code_in_file(file, name, bound + _closure(inner))


def code_in_file(
    file: Path, name: str, more: str = "", places: Sequence[str] | None = None
) -> Code:
    """The code of a function in a file.

    Args:
        file: that defines it.
        name: of the function.
        more: what else belongs to it, as text.
        places: as for `sources_of`.
    """
    found = sources_of(file, places)
    outside = tuple(found.outside())
    return Code(
        f"{file.name}:{name}",
        _sha(_trees(found, file) + more),
        found.root,
        found.files,
        tuple(map(str, found.places)),
        tuple(found.untracked),
        outside,
        _sha(_trees(sources_of(file, ()), file) + more) if outside else "",
    )


def digest_of_file(file: Path, places: Sequence[str] | None = None) -> str:
    """The hash of a file and of what it imports, as in `code_of` for a function at its top level.

    Args:
        file: where to begin.
        places: as for `sources_of`.
    """
    return _sha(_trees(sources_of(file, places), file))


def code_of_class(kind: type) -> str:
    """The hash of the code of a class: of its file and what that imports, or of its
    source in a notebook."""
    file = _file(kind)
    return (
        digest_of_file(file)
        if file is not None
        else _sha("\n".join(sorted(set(_reachable(kind, set())))))
    )


def _trees(sources: Sources, entry: Path) -> str:
    started = entry.resolve().relative_to(sources.root).as_posix()
    texts = []
    for name in sorted(sources.files):
        tree = parsed(sources.files[name], sources.paths[name])
        texts.append(f"{name}\n{normalized(_without_start(tree) if name == started else tree)}")
    return "\n".join(texts)


def normalized(tree: ast.AST) -> str:
    """The code without comments, layout and docstrings.

    >>> normalized(ast.parse("def f( x ):\\n    'doc'\\n    return (x)  # so"))
    'def f(x):\\n    return x'
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
            and node.body
        ):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree))


def _without_start(tree: ast.Module) -> ast.Module:
    """A script without what only starts or shows the comparison: more seeds there
    must not make new trials."""
    kept: list[ast.stmt] = []
    made: set[str] = set()
    for statement in tree.body:
        names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
        starts = _calls_compare(statement) or _is_main(statement)
        shows = isinstance(statement, ast.Expr | ast.Assign) and bool(names & made)
        if starts or shows:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            made |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        else:
            kept.append(statement)
    return ast.Module(kept, tree.type_ignores)


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _calls_compare(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    called = [ast.unparse(n.func) for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return any(name in ("compare", "dampen.compare") for name in called)


def _unwrapped(function: Any) -> tuple[Any, str]:
    """The function itself, and what is bound to it, as text."""
    bound = ""
    while isinstance(function, functools.partial):
        bound += repr((function.args, sorted(function.keywords.items())))
        function = function.func
    return inspect.unwrap(function), bound


def _file(function: Any) -> Path | None:
    target = (
        function
        if isinstance(function, FunctionType | type) or inspect.ismethod(function)
        else type(function)
    )
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        return None
    path = Path(file) if file else None
    return (
        path
        if path is not None and path.is_file() and "ipykernel" not in path.parts[-2:][0]
        else None
    )


def _reachable(thing: Any, seen: set[int]) -> Iterator[str]:
    """The sources of a function and of all that it names, as far as it was typed
    where the function was."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        if file and Path(file).suffix == ".py" and is_users(Path(file)):
            yield digest_of_file(Path(file))
    elif isinstance(thing, FunctionType):
        yield _source(thing)
        yield _closure(thing)
        for name in _names(thing.__code__):
            if name in thing.__globals__:
                yield from (
                    f"{name}: {texts}" for texts in _reachable(thing.__globals__[name], seen)
                )
    elif isinstance(thing, type) and thing.__module__ == "__main__":
        yield _source(thing)
        for member in vars(thing).values():
            if isinstance(member, FunctionType):
                yield from _reachable(member, seen)
    else:
        yield _value(thing)


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def _source(thing: Any) -> str:
    try:
        return normalized(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (
        OSError,
        TypeError,
        SyntaxError,
    ):  # typed where Python keeps no source: the compiled code has to do
        code = getattr(thing, "__code__", None)
        return f"{thing.__qualname__} {code.co_code.hex() if code else ''} {code.co_consts if code else ''}"


def _closure(function: Any) -> str:
    """The values that a nested function took from where it was defined."""
    cells = getattr(function, "__closure__", None) or ()
    return " ".join(_value(c.cell_contents) for c in cells)


def _value(value: Any) -> str:
    """Plain values and arrays count by content, everything else by its type."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(k)}: {_value(v)}" for k, v in value.items()) + "}"
    array = (
        value.detach().cpu().numpy()
        if hasattr(value, "detach") and hasattr(value, "numpy")
        else value
    )
    if hasattr(array, "tobytes") and hasattr(array, "dtype"):
        return f"array {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
