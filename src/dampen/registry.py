"""The methods by name: whatever `dampen.methods` lists, what installed packages offer, and what a
file holds."""

from __future__ import annotations

import functools

from dampen import methods as _methods
from dampen.extensions import from_file, from_plugins, is_in_file
from dampen.names import nearest
from dampen.regularizer import Regularizer, snake_case


@functools.cache
def _own_methods() -> dict[str, type[Regularizer]]:
    classes = [getattr(_methods, name) for name in _methods.__all__]
    return {
        snake_case(c.__name__): c
        for c in classes
        if isinstance(c, type) and issubclass(c, Regularizer)
    }


def methods() -> dict[str, type[Regularizer]]:
    """Every method by its registry name, in alphabetical order: ours, and those of installed
    packages.

    >>> "drop_key" in methods()
    True
    """
    found = dict(_own_methods())
    for name, thing in from_plugins("dampen.methods").items():
        if name in found:
            raise ValueError(
                f"a package offers a method {name!r}, which "
                "dampen has itself. It needs another name."
            )
        found[name] = _checked(name, thing)
    return dict(sorted(found.items()))


def find_method(name: str) -> type[Regularizer]:
    """The class of a method, by registry name, class name or `file.py:Class`; else an error with
    the nearest name.

    Args:
        name: registry name, class name, or `file.py:Class`.
    """
    if is_in_file(name):
        return _checked(name, from_file(name))
    known = methods()
    key = name if name in known else snake_case(name)
    if key in known:
        return known[key]
    raise ValueError(f"there is no method {name!r}{nearest(key, known)}")


def _checked(name: str, thing: object) -> type[Regularizer]:
    if isinstance(thing, type) and issubclass(thing, Regularizer):
        return thing
    raise ValueError(f"{name} is {thing!r}, not a subclass of dampen.Regularizer.")
