"""How a user's training function reaches the process that runs it.

A function in a file is imported there, with the file's folder on the path, as its author would do
it. A function from a notebook, from `__main__` or from inside another function is sent by value,
with cloudpickle."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from dampen._torch import declare_torchvision_operators
from dampen.studies.errors import ConfigError, LabError, OwnCodeError
from dampen.studies.methods_text import OBJECT, build_methods
from dampen.studies.processes import is_ctrl_c
from dampen.studies.run import Run
from dampen.studies.user_code import Code, code_in_file, code_of, digest_of_file, package_root

_reading: list[str] = []


@dataclass(frozen=True)
class Function:
    """A training function that can be sent to another process, with what its trials need beside
    their plain data.
    """

    code: Code
    file: str | None = None  # where it is imported from
    attribute: str = ""
    pickled: bytes | None = None  # or the function itself
    objects: dict[str, bytes] = field(
        default_factory=dict
    )  # regularizers that have no plain form, by their hash
    rows: dict[str, str] = field(default_factory=dict)  # the name of each trial's row
    metric: tuple[str, str] | None = None  # what the study is judged by, and 'max' or 'min'
    must_validate: bool = False  # settings are chosen by this metric on validation

    def load(self) -> Callable[..., Any]:
        """The function, in this process; a worker that stays alive imports it once."""
        if self.pickled is not None:
            import cloudpickle

            declare_torchvision_operators()  # unpickling may import timm or transformers
            sent: Callable[[Any], Any] = cloudpickle.loads(self.pickled)
            return sent
        assert self.file is not None  # a function is either sent or imported
        file = Path(self.file)
        if (
            not file.is_file()
        ):  # another machine without this folder: write down what was read where it started
            file = _written(tuple(sorted(self.code.files.items()))) / file.relative_to(
                package_root_of(self.code)
            )
        elif digest_of_file(file, self.code.places) != self.code.digest:
            raise LabError(
                f"{file} or a file that it imports was changed after this run had started, so that "
                "this trial would "
                "not be what it is recorded as. Start the comparison again."
            )
        # Where the program that started the comparison changed sys.path, its workers need the same.
        sys.path.extend(p for p in self.code.places if p not in sys.path and Path(p).is_dir())
        found: Any = _import(str(file), self.code.digest)
        for part in self.attribute.split("."):
            found = getattr(found, part)
        function: Callable[[Any], Any] = found
        return function


def check_signature(function: Callable[..., Any], name: str) -> None:
    """Refuse what could not be called with a trial, before anything starts.

    Args:
        function: the user's.
        name: for messages.
    """
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        taken = inspect.signature(function)
        problem = f"{name}{taken} must take one argument, the trial: {error}"
        raise ConfigError(
            "The training function", [f"{problem}. Write def train(trial): ..."]
        ) from None
    except ValueError:  # a builtin without a signature: its call will show it
        return


def package_root_of(code: Code) -> Path:
    """The folder that the names of a code's files are relative to."""
    assert code.root is not None  # code in files has one
    return code.root


def row_methods(spec: Run, function: Function | None, row: str) -> list[Any]:
    """The regularizers of a trial: built from plain data, or unpickled where there is none."""
    objects = function.objects if function else {}
    made = []
    for method in spec.methods:
        if OBJECT not in method:
            made += build_methods([method])
            continue
        if method[OBJECT] not in objects:
            name = method["name"]
            problem = f"the regularizer {name!r} of {row!r} is an object that was not sent along"
            raise ConfigError(
                "The trial", [f"{problem}; start the comparison from where it is defined"]
            )
        import cloudpickle

        made.append(cloudpickle.loads(objects[method[OBJECT]]))
    return made


def as_function(train: Callable[[Any], Any]) -> Function:
    """A function object, ready to be sent."""
    if not callable(train):
        raise ConfigError(
            "The comparison", [f"train: expected a function of a trial, got {train!r}"]
        )
    code = code_of(train)
    module = sys.modules.get(getattr(train, "__module__", ""), None)
    file = str(getattr(module, "__file__", None) or "")
    name = getattr(train, "__qualname__", "")
    at_top = (
        file and module is not None and module.__name__ != "__main__" and _at(module, name) is train
    )
    if at_top and code.root is not None and digest_of_file(Path(file), code.places) == code.digest:
        return Function(code, str(Path(file).resolve()), name)
    import cloudpickle

    try:
        return Function(code, pickled=cloudpickle.dumps(train))
    except Exception as error:  # whatever the user's objects raise
        problem = f"train: {name} cannot be sent to the workers: {type(error).__name__}: {error}"
        raise ConfigError(
            "The comparison", [f"{problem}. Make what it needs inside the function"]
        ) from error


def _at(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def function_in_file(text: str, what: str = "The training function") -> Function:
    """`train.py:train`, as on the command line; `what` is what an error is about."""
    path, colon, name = text.rpartition(":")
    if not colon or path.endswith(("/", "\\")) or name.endswith(".py"):
        path, name = text, ""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(what, [f"{text}: there is no file {path!r}; write file.py:function"])
    module = _import(str(file.resolve()), digest_of_file(file))
    found = _at(module, name) if name else None
    if not callable(found):
        own = sorted(
            n
            for n, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        known = f"; it has {', '.join(own)}" if own else "; it defines none"
        missing = (
            f"{file.name} has no function {name!r}"
            if name
            else f"say which function of {file.name}"
        )
        raise ConfigError(what, [f"{text}: {missing}{known}. Write {path}:FUNCTION"])
    code = code_in_file(file, name)  # after the import, which may have changed sys.path
    return Function(code, str(file.resolve()), name)


def being_read() -> str | None:
    """The file that is being imported for its function just now, if any: a comparison must not
    start inside it.
    """
    return _reading[-1] if _reading else None


@contextmanager
def _noted(file: str) -> Iterator[None]:
    _reading.append(file)
    try:
        yield
    finally:
        _reading.pop()


@lru_cache(maxsize=8)
def _import(file: str, digest: str) -> Any:
    """Import a file under its place in its package, or under a name of its own, with its folder on
    the path.
    """
    declare_torchvision_operators()  # the file may import timm or transformers
    path, root = Path(file), package_root(Path(file))
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    with _noted(file), _in_their_words(path, root):
        if path.parent != root:  # inside a package: its relative imports need the package
            return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
        name = f"dampen_own_{path.stem}_{digest}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(
                "The training function", [f"{path.name}: Python reads only files that end in .py"]
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # half a module must not be found by the next import
            raise
        return module


@contextmanager
def _in_their_words(path: Path, root: Path) -> Iterator[None]:
    """An error of a file at its import, with the line of the user's own code that it came from."""
    try:
        yield
    except LabError:
        raise
    except BaseException as error:  # CancelledError, SystemExit and others are no Exception
        if is_ctrl_c(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f
            for f in frames
            if Path(f.filename).is_relative_to(root) and "site-packages" not in f.filename
        ]
        place = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""
        message = "".join(traceback.format_exception_only(error)).strip()
        raise OwnCodeError(f"{path.name} cannot be imported: {place}{message}") from error


@lru_cache(maxsize=4)
def _written(files: tuple[tuple[str, str], ...]) -> Path:
    root = Path(tempfile.mkdtemp(prefix="dampen-function-"))
    for name, text in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@dataclass(frozen=True)
class Parts:
    """Places and functions of the user's own parts; None where the built-in ones are used."""

    data: str | None = None  # a file or folder
    read: Function | None = None  # a function that returns data sets
    model: str | None = None  # a folder of a saved Hugging Face model
    build: Function | None = None  # a function that returns a model
