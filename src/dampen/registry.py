"""The methods by name. Nothing is registered by hand: whatever `dampen.methods` lists is here."""

from __future__ import annotations

import difflib

from dampen import methods as _methods
from dampen.regularizer import Regularizer, snake_case


def methods() -> dict[str, type[Regularizer]]:
    """Every method by its registry name, in alphabetical order.

    >>> "drop_key" in methods()
    True
    """
    classes = [getattr(_methods, name) for name in _methods.__all__]
    found = {snake_case(c.__name__): c for c in classes if isinstance(c, type) and issubclass(c, Regularizer)}
    return dict(sorted(found.items()))


def find_method(name: str) -> type[Regularizer]:
    """The class of a method, by registry or class name, or an error that names the nearest known one."""
    known = methods()
    key = name if name in known else snake_case(name)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no method {name!r}.{hint} Known: {', '.join(known)}.")
