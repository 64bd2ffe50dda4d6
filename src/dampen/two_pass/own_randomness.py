"""What is random in a model by itself, before any regularizer: its dropout, its stochastic depth."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dampen._torch import DropoutModule
from dampen.regularizer import Regularizer


def own_randomness(named: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The modules that draw in training, by name: dropout with p > 0, and modules with a rate of the kind (`drop_prob`,
    `attention_dropout`, `layerdrop`) between 0 and 1.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0))
    >>> own_randomness(model.named_modules())
    ['1']
    """
    return [name for name, m in named if not isinstance(m, Regularizer) and draws(m)]


def draws(module: nn.Module) -> bool:
    """Whether a module, apart from its children, has a drop rate above 0."""
    if isinstance(module, DropoutModule):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    rates = [
        v for k, v in vars(module).items() if "drop" in k.lower() and isinstance(v, float | int)
    ]
    return any(not isinstance(r, bool) and 0 < r <= 1 for r in rates)
