"""What one would write into a model instead of attaching a method: the other half of `real_models`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.real_subjects import Subject, named
from dampen.studies.bench.subject import attention_as

Step = Callable[[], None]
Change = Callable[[Subject, nn.Module], Callable[[], Tensor | float]]
"""Changes a copy of a model and returns what reads the penalty of its last forward."""
RATE, WEIGHT, EXPLICIT_RATE = 0.1, 0.05, 0.2
SDPA = F.scaled_dot_product_attention


class TupleDropPath(nn.Module):
    """timm's DropPath behind a branch that may also return its weights."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        from timm.layers import DropPath

        self.branch, self.drop = branch, DropPath(RATE)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.branch(*args, **kwargs)
        return (self.drop(out[0]), *out[1:]) if isinstance(out, tuple) else self.drop(out)


def attention_dropout(subject: Subject, model: nn.Module) -> Callable[[], float]:
    """The model's own switch: its dropout module, timm's attn_drop, or `dropout_p`."""
    for _, _, module in named(model, subject.dropped):
        module.p = RATE  # type: ignore[assignment]
    return lambda: 0.0


def drop_path(subject: Subject, model: nn.Module) -> Callable[[], float]:
    for parent, name, module in named(model, subject.branches):
        setattr(parent, name, TupleDropPath(module))
    return lambda: 0.0


def ffn_dropout(subject: Subject, model: nn.Module) -> Callable[[], float]:
    for parent, name, module in named(model, subject.ffn):
        setattr(parent, name, nn.Sequential(nn.Dropout(RATE), module))
    return lambda: 0.0


def explicit(subject: Subject, model: nn.Module) -> Callable[[], Tensor]:
    """J = lambda p^2 / 2 mean ||x W^T||^2 by forward hooks on the layers."""
    kept: list[Tensor] = []
    mask = None if subject.valid is None else subject.valid.float()
    count = torch.ones(()) if mask is None else mask.sum()

    def see(cut: bool, module: Any, _: Any, out: Tensor) -> None:
        start = 2 * module.weight.shape[0] // 3 if cut else 0
        bare = out[..., start:]
        if module.bias is not None:
            bare = bare - module.bias[start:]
        squares = bare.square().sum(-1)
        kept.append(squares.mean() if mask is None else (squares * mask).sum() / count)

    for patterns, cut in ((subject.values, subject.fused), (subject.ffn, False)):
        for _, _, module in named(model, patterns):
            module.register_forward_hook(partial(see, cut))

    def collect() -> Tensor:
        total = 0.5 * EXPLICIT_RATE**2 * WEIGHT * torch.stack(kept).sum()
        kept.clear()
        return total

    return collect


def sdpa_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    return SDPA(*args, **kwargs, dropout_p=RATE)  # type: ignore[misc]


def sdpa_drop_key(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """DropKey's own mask, given to SDPA."""
    mask = torch.bernoulli(q.new_full((*q.shape[:3], k.shape[2]), RATE)) * -1e12
    if is_causal:
        hidden = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
        mask = mask.masked_fill(hidden, float("-inf"))
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        mask = mask.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        mask = mask + attn_mask
    return SDPA(q, k, v, mask, **kwargs)


def softmax_drop_key(scores: Tensor, dim: int = -1, **kwargs: Any) -> Tensor:
    """The same before a softmax that the model calls itself; every form of it ends here."""
    scores = scores + torch.bernoulli(torch.full_like(scores, RATE)) * -1e12
    out: Tensor = SOFTMAX(scores, dim, **kwargs)
    return out


SOFTMAX = Tensor.softmax


def step(subject: Subject, changes: list[Change], keys: str = "") -> Step:
    """A step of a copy with some changes, and with DropKey or dropout in its attention."""
    model = subject.copy()
    collectors = [change(subject, model) for change in changes]
    function = {"mask": sdpa_drop_key, "dropout": sdpa_dropout}.get(keys, SDPA)

    def loss() -> Tensor:
        total: Any = subject.loss(subject.forward(model))
        for collect in collectors:
            total = total + collect()
        return total

    if not keys:
        return subject.step(loss)
    if subject.dropped and keys == "dropout":
        attention_dropout(subject, model)
        return subject.step(loss)

    def patched() -> Tensor:
        if not subject.dropped:
            with attention_as(function):
                return loss()
        Tensor.softmax = softmax_drop_key  # type: ignore[method-assign,assignment]
        try:
            return loss()
        finally:
            Tensor.softmax = SOFTMAX  # type: ignore[method-assign]

    return subject.step(patched)


def written_by_hand(subject: Subject) -> dict[str, Step]:
    """Each method as one would write it into the model, with the parts' own names."""
    return {
        "DropKey by hand": step(subject, [], "mask"),
        "attention dropout by hand": step(subject, [], "dropout"),
        "DropPath by hand": step(subject, [drop_path]),
        "Explicit by hand": step(subject, [explicit]),
        "feed-forward dropout by hand": step(subject, [ffn_dropout]),
        "DropKey + Explicit by hand": step(subject, [explicit], "mask"),
        "DropKey + Explicit + DropPath by hand": step(subject, [explicit, drop_path], "mask"),
    }
