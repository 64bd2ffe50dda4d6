"""The identity of a user's code: a hash of the syntax trees of a file and of the local files that it imports.

Comments, layout and docstrings do not count, nor does the part of a script that only starts the comparison. A function
typed into a notebook has no file: there the sources of all that it reaches count instead.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dampen.studies.errors import ConfigError


@dataclass(frozen=True)
class Code:
    """A function's name for people, the hash of its code, and the files it is made of, relative to `root`."""

    name: str
    digest: str
    root: Path | None = None
    files: dict[str, str] = field(default_factory=dict)


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
    files = local_files(file)
    root = package_root(file)
    return Code(
        f"{file.name}:{name}",
        _sha(_trees(root, files, file) + bound + _closure(inner)),
        root,
        files,
    )


def digest_of_file(file: Path) -> str:
    """The hash of a file and of what it imports, as in `code_of` for a function at its top level."""
    return _sha(_trees(package_root(file), local_files(file), file))


def code_of_class(kind: type) -> str:
    """The hash of the code of a class: of its file and what that imports, or of its source in a notebook."""
    file = _file(kind)
    return (
        digest_of_file(file)
        if file is not None
        else _sha("\n".join(sorted(set(_reachable(kind, set())))))
    )


def package_root(file: Path) -> Path:
    """The folder from which imports of a file are found: its own, or the one above its outermost package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def local_files(file: Path) -> dict[str, str]:
    """The text of a file and of every file below its root that it imports, directly or not, by relative path."""
    root, waiting, found = package_root(file), [file.resolve()], dict[str, str]()
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name not in found:
            found[name] = path.read_text(encoding="utf-8")
            waiting += _imported(_parse(found[name], path), path, root)
    return found


def _imported(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root
            for _ in range(node.level):
                base = file.parent if base == root else base.parent
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _modules(base, [*parts, alias.name])


def _modules(base: Path, parts: list[str]) -> Iterator[Path]:
    """`a.b.c` below `base`: the packages on the way and the module, as far as there are such files."""
    if (base / "__init__.py").is_file():
        yield base / "__init__.py"
    for i in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:i])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path.resolve()


def _parse(text: str, file: Path) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(str(file), [f"line {error.lineno}: {error.msg}"]) from error


def _trees(root: Path, files: dict[str, str], entry: Path) -> str:
    started = entry.resolve().relative_to(root).as_posix()
    texts = []
    for name in sorted(files):
        tree = _parse(files[name], root / name)
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
    """A script without what only starts or shows the comparison: more seeds there must not make new trials."""
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
    """The sources of a function and of all that it names, as far as it was typed where the function was."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, ModuleType):
        file = getattr(thing, "__file__", None)
        if (
            file
            and Path(file).suffix == ".py"
            and Path.cwd() in Path(file).resolve().parents
            and _own(file)
        ):
            yield digest_of_file(Path(file))
    elif isinstance(thing, FunctionType):
        yield _source(thing)
        yield _closure(thing)
        for name in _names(thing.__code__):
            if name in thing.__globals__:
                yield from (f"{name}: {text}" for text in _reachable(thing.__globals__[name], seen))
    elif isinstance(thing, type) and thing.__module__ == "__main__":
        yield _source(thing)
        for member in vars(thing).values():
            if isinstance(member, FunctionType):
                yield from _reachable(member, seen)
    else:
        yield _value(thing)


def _own(file: str) -> bool:
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


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
