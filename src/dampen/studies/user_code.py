"""The identity of a user's code: a hash of the syntax trees of a file and of the user's files that it imports.

`user_modules.py` says which files these are. Until 0.2 only those below the file's own folder counted: where others are
imported, `Code.earlier` is the hash that older records have. Comments, layout and docstrings do not count, nor does the
part of a script that only starts the comparison. A function typed into a notebook has no file: there the sources of all
that it reaches count instead.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dampen.studies.user_modules import Sources, is_users, parsed, sources_of


@dataclass(frozen=True)
class Code:
    """A function's name for people, the hash of its code, and the files it is made of, relative to `root` or to one of
    `places`."""

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
    """The hash of the code of a class: of its file and what that imports, or of its source in a notebook."""
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
