"""HiddenKey: a composition of methods by its paper's name."""

from __future__ import annotations

from dampen.methods.drop_key import DropKey
from dampen.methods.dropouts import HiddenDropout
from dampen.methods.r_drop import RDrop
from dampen.regularizer import Regularizer
from dampen.schedules import Value


def hidden_key(key: Value = 0.1, hidden: Value = 0.1, weight: Value = 1.0) -> list[Regularizer]:
    """HiddenKey (arXiv 2403.00812), for fine-tuning language models with LoRA: column DropKey in
    attention, dropout of single features on the hidden states, and a bidirectional KL between two
    passes.

    Differences from the paper: the paper drops the feed-forward's output representation; here both
    residual branches are dropped, where hidden dropout is in the models that have it. A weight of
    the plain number 0 leaves the KL, and with it the second pass, out: the paper's HiddenKey^-.

    Args:
        key: rate of the keys that are hidden from all queries at once.
        hidden: rate of the features dropped in each residual branch.
        weight: of the KL between the two passes.

    Returns:
        the methods, to be given to `dampen.regularize`.

    >>> import dampen
    >>> dampen.hidden_key(weight=0)
    [DropKey(rate=0.1, unit=column), HiddenDropout(rate=0.1)]
    """
    methods: list[Regularizer] = [DropKey(key, unit="column"), HiddenDropout(hidden)]
    without = isinstance(weight, int | float) and weight == 0
    if without:
        return methods
    return [*methods, RDrop(weight)]
