"""The penalties of Explicit Dropout as plain functions of tensors: the public path of
`dampen.functional.explicit`."""

from typing import Any

from dampen.functional.explicit import *  # noqa: F403
from dampen.functional.explicit import __all__ as __all__
from dampen.names import moved_out

_MOVED = dict.fromkeys(("AppendixB", "appendix_b", "r_arora", "r_cross"), "appendix_b")
"""What was here until 0.3, and its module in `reproductions/metrics`."""


def __getattr__(name: str) -> Any:
    moved_out(__name__, name, "metrics", _MOVED)
