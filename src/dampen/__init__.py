"""dampen: any Transformer regularizer in any PyTorch model in one line, at almost no cost.

The names are in `public.py` and come in on first use, so that the command prints its help without waiting for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'dampen' has no attribute {name!r}")
    public = importlib.import_module("dampen.public")
    if not hasattr(public, name):
        raise AttributeError(f"module 'dampen' has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("dampen.public").__all__})
