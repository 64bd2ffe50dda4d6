"""Names of 0.2 that changed. Each works until 0.4 and warns once; these tables are
all there is of them."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar

from dampen.names import nearest

PUBLIC = {"Regularization": "Handle"}
"""Names of `dampen`."""
ARGUMENTS = {"sites": "target_modules", "carry": "attach_to_loss"}
"""Keywords of `regularize`, `Trial.regularize`, `set_builtin_dropout` and
`regularize_convolutions`."""
HANDLE = {"asked": "in_loss", "carried": "attached"}
"""Attributes of a `Handle`; its method `own` became two."""

P = ParamSpec("P")
R = TypeVar("R")
_warned: set[str] = set()


def warn_renamed(old: str, new: str, level: int = 2) -> None:
    """Warn, once per process, that a name has changed.

    Args:
        old: what was used, as its user writes it.
        new: what to write instead.
        level: frames between the user's line and the caller of this function.
    """
    if old not in _warned:
        _warned.add(old)
        message = f"{old} is now {new}; the old name works until dampen 0.4."
        warnings.warn(message, DeprecationWarning, stacklevel=level + 1)


def accepts_old_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function take the keywords that it had before, with a warning.

    Args:
        function: which has some of the new names in `ARGUMENTS`.
    """

    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        for old, new in ARGUMENTS.items():
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(
                        f"{function.__name__}() got {old}= and "
                        f"{new}=, its new name. Give {new}= alone."
                    )
                warn_renamed(f"{function.__name__}({old}=...)", f"{function.__name__}({new}=...)")
                kwargs[new] = kwargs.pop(old)
        for name in kwargs:
            if name not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}{nearest(name, known)}"
                )
        return function(*args, **kwargs)

    return wrapper


class OldNames:
    """A class some of whose attributes have changed their names, as its table says."""

    _old_names: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        new = type(self)._old_names.get(name)
        if new is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"{type(self).__name__}.{name}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    def own(self: Any, rate: Any = None, sites: Any = "*") -> Any:
        """What is `builtin_dropout` now, and with a rate `set_builtin_dropout`."""
        if rate is None:
            warn_renamed("reg.own()", "reg.builtin_dropout()")
            return self.builtin_dropout(sites)
        warn_renamed("reg.own(rate)", "reg.set_builtin_dropout(rate)")
        return self.set_builtin_dropout(rate, sites)
