"""The penalties of Explicit Dropout as plain functions of tensors, under their public path; see `formulas/explicit`."""

from dampen.formulas.explicit import *  # noqa: F403
from dampen.formulas.explicit import __all__ as __all__
