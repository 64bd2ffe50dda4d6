"""Which code that a study folder keeps or names may run here: what the user
of this machine approved.

A study folder may come from anyone. Its plan can name plug-ins and methods in files, and a training
function is kept beside it. Opening a study runs none of this. Before any of it runs, the hash of
its source must be approved: it is approved when the user runs it themselves (`dampen.compare`,
`dampen run`), or by `trust=True`. Approvals are kept per user, in the cache
folder and never in a study.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import os
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, all_suffixes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dampen.extensions import IN_FILE
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.files import cache_folder, read_json
from dampen.studies.plugins import folder_of
from dampen.studies.user_code import Sources, is_users, sources_of, sources_of_package

if TYPE_CHECKING:
    from dampen.studies.comparison import Comparison
    from dampen.studies.run import Run
    from dampen.studies.trainer.user_function import Function

APPROVED = "approved_code.txt"
"""The file of approvals in the cache folder: on each line a sha256 and what it belongs to."""


class NotApproved(LabError):
    """A study brings code that the user of this machine did not approve; nothing of it was run."""

    exit_code = 2


@dataclass(frozen=True)
class KeptCode:
    """Code that a study keeps or names: what it is, the file that holds it, and
    the sha256 of its source.

    `sources` are the user's files that it is read from.
    """

    what: str
    place: str
    digest: str
    sources: tuple[Path, ...] = ()


_approved_here: set[str] = set()  # of this process, where the file cannot be written


def approve(code: Iterable[KeptCode]) -> None:
    """Approve code for the user of this machine.

    Args:
        code: what was read, or run by the user themselves.
    """
    known = _approved()
    new = {kept.digest: kept for kept in code if kept.digest not in known}
    if not new:
        return
    _approved_here.update(new)
    path = _approvals()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as file:
            file.writelines(f"{digest} {kept.what!r}\n" for digest, kept in new.items())
    except OSError as error:
        warning = f"The approval of code could not be kept in {path} ({error}), so it ends with this process."
        warnings.warn(warning, stacklevel=2)


def require_approval(folder: Path, code: Iterable[KeptCode], how: str = "") -> None:
    """Raise NotApproved, with file, hash and what to type, where code of a study was not approved.

    What was approved is a source. Bytecode beside it is deleted, because
    Python would run that instead.

    Args:
        folder: of the study.
        code: what would run.
        how: what to type to approve it; default: the call of `dampen.load`.
    """
    known, code = _approved(), list(code)
    strange = {kept.digest: kept for kept in code if kept.digest not in known}
    if not strange:
        for source in {source for kept in code for source in kept.sources}:
            _delete_bytecode(source)
        return
    listed = "".join(f"\n  - {k.what} in {k.place} (sha256 {k.digest})" for k in strange.values())
    how = how or f"dampen.load({str(folder)!r}, trust=True)"
    raise NotApproved(
        f"{folder} needs code that was not approved on this "
        f"machine. Nothing of it was run:{listed}\n"
        f"Read it. If you trust its author, approve it with {how}."
    )


def _delete_bytecode(source: Path) -> None:
    """Delete what `__pycache__` holds of a source: it says itself which text it was made from."""
    for path in (source.parent / "__pycache__").glob(f"{glob.escape(source.stem)}.*.pyc"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LabError(
                f"{path} cannot be deleted ({error.strerror}), and "
                "Python would run it in place of the approved "
                f"{source.name}. Delete it, or copy the study to a folder that you can write to."
            ) from error


def _approved() -> set[str]:
    path = _approvals()
    try:
        found = path.stat()
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return set(_approved_here)
    if os.name == "posix":
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid != os.getuid() or others:
            raise LabError(
                f"{path} holds your approvals of code, but others can write "
                "to it. Make sure that it is yours, then "
                f"type: chmod 600 {path}"
            )
    return _approved_here | {line.split(" ", 1)[0] for line in lines}


def _approvals() -> Path:
    return cache_folder() / APPROVED


# --- what a study keeps or names


def code_of_function(function: Function | None, place: Path) -> list[KeptCode]:
    """A function as it is kept with a study, and the regularizers that are kept beside it.

    Args:
        function: the training function, or one that returns data or a model.
        place: the file of the study that keeps it.
    """
    if function is None:
        return []
    name, where, digest = function.code.name, str(place), hashlib.sha256()
    sources: tuple[Path, ...] = ()
    if function.pickled is not None:
        digest.update(function.pickled)
    else:
        assert function.file is not None  # a function is either sent or imported
        where, code = function.file, sources_of(Path(function.file), function.code.places)
        sources = tuple(code.paths.values())
        digest.update(f"{function.attribute}\n{_text(_files(code))}".encode())
        digest.update("".join(f"\n{place}" for place in function.code.places).encode())
    found = [KeptCode(f"the function {name}", where, digest.hexdigest(), sources)]
    for method in function.objects.values():
        found.append(
            KeptCode("a pickled regularizer", str(place), hashlib.sha256(method).hexdigest())
        )
    return found


def code_of_plan(plan: Comparison, near: Path, imported: bool = False) -> list[KeptCode]:
    """The plug-ins and the files of methods that a plan names.

    Args:
        plan: of a study.
        near: the study's folder; plug-ins are looked for above it.
        imported: list plug-ins too that this process has imported already.
    """
    names = plan.header.get("plugins", ())
    wanted = [name for name in names if imported or name not in sys.modules]
    return [*code_of_methods(plan.runs.values()), *_of_plugins(wanted, near)]


def code_of_methods(runs: Iterable[Run]) -> Iterator[KeptCode]:
    """The files of methods that runs name, as `my.py:HeadDropout`.

    Args:
        runs: of a plan.
    """
    names = set[str]()
    for run in runs:
        before = run.pretraining()
        names |= {m["name"] for m in (*run.methods, *(before.methods if before else ()))}
    for name in sorted(names):
        match = IN_FILE.fullmatch(name)
        path = Path(match["file"]).expanduser() if match else None
        if path is not None and path.is_file():  # one that is not there cannot run
            code = sources_of(path)
            yield KeptCode(
                f"the method {name}",
                str(path.resolve()),
                _sha(_text(_files(code))),
                tuple(code.paths.values()),
            )


def _of_plugins(names: Iterable[str], near: Path) -> Iterator[KeptCode]:
    for name in names:
        first = str(name).split(".")[0]
        folder = None if first in sys.modules else folder_of(first, near)
        if folder is None:
            spec = find_spec(first) if first.isidentifier() else None
            place = Path(spec.origin or "") if spec is not None else Path()
            if not place.is_file():  # loading it fails, or it is built into Python
                continue
            place = place.parent if place.stem == "__init__" else place
        else:
            single = folder / f"{first}.py"  # Python takes it before a folder without __init__.py
            package = (folder / first / "__init__.py").is_file() or not single.is_file()
            place = folder / first if package else single
        files, sources = _sources(place)
        yield KeptCode(f"the plug-in {name}", str(place), _sha(_text(files)), sources)


def require_no_remote_code(folder: str | Path) -> None:
    """Refuse a saved Hugging Face model or tokenizer whose configuration names Python code to run.

    Args:
        folder: that `save_pretrained` wrote.
    """
    for path in sorted(Path(folder).glob("*config.json")):
        if _names_code(read_json(path, "Save the model again.")):
            raise ConfigError(
                "The model",
                [
                    f"{path} has an auto_map: this model needs Python code "
                    "that comes with it, and dampen runs none of "
                    "it. Read that code, build the model in a function of "
                    "your own, and pass FILE.py:FUNCTION as model"
                ],
            )


def _names_code(config: Any) -> bool:
    if isinstance(config, list):
        return any(map(_names_code, config))
    return isinstance(config, dict) and (
        "auto_map" in config or any(map(_names_code, config.values()))
    )


def _sources(place: Path) -> tuple[dict[str, str], tuple[Path, ...]]:
    """Everything that Python could import of a package or a module, and what of the user's own it
    imports from elsewhere, by relative path; and which of these files are
    sources of the user's own."""
    if not place.is_dir():
        if place.suffix == ".py":
            code = sources_of(place)
            if not is_users(place):
                return code.files, ()
            return _files(code), tuple(code.paths.values())
        return {place.name: place.read_bytes().hex()}, ()
    files = [p for p in place.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    own = {
        p.relative_to(place.parent).as_posix(): p.read_bytes().hex()
        for p in files
        if p.name.endswith(tuple(all_suffixes()))
    }
    # An installed package is beside all others that are installed: those are not followed
    if not is_users(place):
        return own, ()
    code = sources_of_package(place)
    written = {*code.paths.values(), *(p for p in files if p.suffix == ".py")}
    return {**_files(code), **own}, tuple(written)


def _files(code: Sources) -> dict[str, str]:
    """The texts of sources by name, with the hashes of compiled modules that Python could import
    before or beside them."""
    folders = {path.parent for path in code.paths.values()}
    for base in (code.root, *code.places):
        folders |= {base, *(base / name for name in _imported(code) if (base / name).is_dir())}
    suffixes = (*EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)
    found = {
        os.path.relpath(path, code.root): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in folder.iterdir()
        if path.name.endswith(suffixes) and path.is_file()
    }
    return {**code.files, **found}


def _imported(code: Sources) -> Iterator[str]:
    """Every package and module that sources import, as a relative path."""
    for text in code.files.values():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for parts in (name.split(".") for name in names):
                yield from ("/".join(parts[:n]) for n in range(1, len(parts) + 1))


def _text(files: Mapping[str, str]) -> str:
    return json.dumps(files, sort_keys=True)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
