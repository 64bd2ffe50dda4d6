"""dampen: any Transformer regularizer in any PyTorch model in one line, at almost no cost.

The names are in `public.py` and come in on first use, so that the command prints its help without
waiting for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.auditing import audit as audit
    from dampen.public import *  # noqa: F403
    from dampen.studies.combine import combine as combine
    from dampen.studies.compare import compare as compare
    from dampen.studies.errors import Stopped as Stopped
    from dampen.studies.study import Study as Study
    from dampen.studies.study import load as load
    from dampen.studies.trainer.user_trial import Trial as Trial

__version__ = "0.2.0"


_STUDIES = {
    "audit": "dampen.auditing",
    "Stopped": "dampen.studies.errors",
    "Study": "dampen.studies.study",
    "Trial": "dampen.studies.trainer.user_trial",
    "combine": "dampen.studies.combine",
    "compare": "dampen.studies.compare",
    "load": "dampen.studies.study",
}
"""Names at the front door that lie above the core, by their home. The core
itself never imports them."""


def __getattr__(name: str) -> Any:
    if name in _STUDIES:
        return _from_the_lab(name)
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'dampen' has no attribute {name!r}")
    public = importlib.import_module("dampen.public")
    deprecated = importlib.import_module("dampen.deprecated")
    if name in deprecated.PUBLIC:
        deprecated.warn_renamed(f"dampen.{name}", f"dampen.{deprecated.PUBLIC[name]}")
        name = deprecated.PUBLIC[name]
    if not hasattr(public, name):
        raise AttributeError(f"module 'dampen' has no attribute {name!r}")
    return getattr(public, name)


def _from_the_lab(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_STUDIES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("dampen"):
            raise
        raise ModuleNotFoundError(
            f"dampen.{name} needs dampen.studies, and {error.name} is not "
            "installed. Run: pip install 'dampen[studies]'",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_STUDIES, *importlib.import_module("dampen.public").__all__})
