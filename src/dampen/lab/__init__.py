"""The old name of `dampen.studies`. It works until 0.4 and warns."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'dampen.lab' has no attribute {name!r}")
    value = getattr(importlib.import_module("dampen.studies"), name)
    warnings.warn(
        f"dampen.lab.{name} is now dampen.studies.{name}", DeprecationWarning, stacklevel=2
    )
    return value
