"""The catalogue of methods, read from their source without importing torch, so that `dampen list`
answers at once."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from dampen.extensions import is_in_file, references
from dampen.names import MATRIX_STAGES, STAGES, nearest, snake_case
from dampen.studies.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class CatalogEntry:
    """One method as its class declares it."""

    name: str
    cls: str
    summary: str
    doc: str
    papers: list[str]
    stages: list[str]
    arguments: dict[str, str]
    passes: int = 1
    in_eval: bool = False
    fused: bool = field(default=True)
    example: dict[str, Any] = field(
        default_factory=dict
    )  # arguments without which it would do nothing

    @property
    def written(self) -> str:
        """How it is written on a command line so that it does something."""
        arguments = ", ".join(f"{k}={v}" for k, v in self.example.items())
        return f"{self.name}({arguments})" if arguments else self.name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(maxsize=1)
def catalog() -> dict[str, CatalogEntry]:
    """Every method that `dampen.methods` lists, by registry name.

    >>> catalog()["drop_key"].papers
    ['2208.02646', '2403.00812']
    """
    tree = ast.parse((PACKAGE / "methods" / "__init__.py").read_text())
    homes = {
        a.asname or a.name: n.module
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.module
        for a in n.names
    }
    listed = next(
        n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    )
    entries = [_entry(cls, str(homes[cls])) for cls in ast.literal_eval(listed.value)]
    entries += [
        _outside(name, *place.split(":")) for name, place in references("dampen.methods").items()
    ]
    return {e.name: e for e in sorted((e for e in entries if e is not None), key=lambda e: e.name)}


def find_entry(name: str) -> CatalogEntry:
    """One method, by registry or class name.

    Args:
        name: a registry name, a class name, or `file.py:Class`.
    """
    known = catalog()
    by_class = {e.cls: e for e in known.values()}
    found = known.get(name) or by_class.get(name)
    if found is None and is_in_file(name):
        file, _, cls = name.rpartition(":")
        found = _outside(name, file, cls)
    if found is None:
        raise ConfigError(f"Method {name!r}", [f"there is no such method{nearest(name, known)}"])
    return found


def _outside(name: str, module: str, cls: str) -> CatalogEntry | None:
    """A method of another package or of a file, under the name that users type."""
    entry = _entry(cls, module)
    return None if entry is None else replace(entry, name=name)


def _entry(cls: str, module: str) -> CatalogEntry | None:
    chain = _ancestry(cls, module)
    if not chain:
        return None  # a function or constant
    doc = ast.get_docstring(chain[0]) or ""
    members = {
        n.name: n for node in reversed(chain) for n in node.body if isinstance(n, ast.FunctionDef)
    }
    constants = {k: v for node in reversed(chain) for k, v in _constants(node)}
    stages = [s for s in STAGES if s in members]
    return CatalogEntry(
        name=snake_case(cls),
        cls=cls,
        summary=" ".join(doc.split("\n\n")[0].split()),
        doc=doc,
        papers=list(dict.fromkeys(re.findall(r"\b(\d{4}\.\d{4,5})\b", doc))),
        stages=stages,
        arguments=_arguments(members["__init__"]) if "__init__" in members else {},
        passes=constants.get("passes", 1),
        in_eval=constants.get("in_eval", False),
        fused=not set(MATRIX_STAGES) & set(stages),
        example=constants.get("example", {}),
    )


def _ancestry(cls: str, module: str) -> list[ast.ClassDef]:
    """The class and those of its ancestors that are methods too, nearest first."""
    path = _source(module)
    if path is None:
        return []
    tree = _parse(path)
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls), None)
    imports = {
        a.asname or a.name: str(n.module)
        for n in tree.body
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    if node is None:
        return _ancestry(cls, imports[cls]) if cls in imports else []
    chain = [node]
    for base in node.bases:
        name = ast.unparse(base)
        if name.rpartition(".")[2] != "Regularizer" and (
            name not in imports or imports[name].startswith("dampen")
        ):
            chain += _ancestry(name, imports.get(name, module))
    return chain


def _source(module: str) -> Path | None:
    """The file of a module of ours, of a file given by its path, or of a
    module of another package."""
    if module.endswith(".py"):
        return Path(module).expanduser()
    path = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        path = PACKAGE.parent / Path(*module.split(".")) / "__init__.py"
    if path.is_file():
        return path
    spec = importlib.util.find_spec(module)  # imports the packages around it, not the module itself
    return Path(spec.origin) if spec is not None and spec.origin else None


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _constants(node: ast.ClassDef) -> list[tuple[str, Any]]:
    found = []
    for statement in node.body:
        target = (
            statement.targets[0]
            if isinstance(statement, ast.Assign)
            else getattr(statement, "target", None)
        )
        value = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant | ast.Dict):
            found.append((target.id, ast.literal_eval(value)))
    return found


def _arguments(init: ast.FunctionDef) -> dict[str, str]:
    """The constructor's arguments with their defaults as they are written."""
    arguments = [a.arg for a in (*init.args.posonlyargs, *init.args.args)][1:]
    defaults = [ast.unparse(d) for d in init.args.defaults]
    found = dict.fromkeys(arguments, "") | dict(
        zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    )
    for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        found[argument.arg] = ast.unparse(default) if default is not None else ""
    return found
