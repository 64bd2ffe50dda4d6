"""The old name of `dampen.functional.graying`. It works until 0.4 and warns."""

import warnings
from typing import Any

from dampen.functional import graying


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'dampen.formulas.graying' has no attribute {name!r}")
    value = getattr(graying, name)
    new = f"dampen.functional.graying.{name}"
    warnings.warn(f"dampen.formulas.graying.{name} is now {new}", DeprecationWarning, stacklevel=2)
    return value
