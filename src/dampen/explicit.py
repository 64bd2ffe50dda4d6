"""The penalties of Explicit Dropout as plain functions of tensors (public path of `functional.explicit`)."""

from dampen.functional.explicit import *  # noqa: F403
from dampen.functional.explicit import __all__ as __all__
