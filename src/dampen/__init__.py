"""dampen: any Transformer regularizer in any PyTorch model in one line, at almost no cost.

The names are in `public.py` and come in on first use, so that the command prints its help without waiting for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.public import *  # noqa: F403

__version__ = "0.1.0"


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'dampen' has no attribute {name!r}")
        public = importlib.import_module("dampen.public")
        if not hasattr(public, name):
            raise AttributeError(f"module 'dampen' has no attribute {name!r}")
        return getattr(public, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attention" and isinstance(value, ModuleType):
            return  # importing the file attention.py must not hide the function of that name
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *importlib.import_module("dampen.public").__all__})


sys.modules[__name__].__class__ = _Package
