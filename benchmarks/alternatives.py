"""What one would write without this package: attention dropout, feed-forward dropout and DropPath, as timm and torch.nn
offer them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from benchmarks.published import fused_attentions, heads_of
from dampen.studies.bench.subject import Formulation, Subject


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` with the weights of an attention that has one fused qkv map."""

    def __init__(self, attention: Any, rate: float) -> None:
        super().__init__()
        width = attention.qkv.in_features
        bias = attention.qkv.bias is not None
        self.attention = nn.MultiheadAttention(
            width, heads_of(attention), rate, bias=bias, batch_first=True
        )
        self.attention.in_proj_weight, self.attention.in_proj_bias = (
            attention.qkv.weight,
            attention.qkv.bias,
        )
        self.attention.out_proj.weight, self.attention.out_proj.bias = (
            attention.proj.weight,
            attention.proj.bias,
        )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class TimmAttention(nn.Module):
    """timm's `Attention` with the weights of an attention that has one fused qkv map."""

    def __init__(self, attention: Any, rate: float, fused: bool) -> None:
        super().__init__()
        from timm.layers import Attention

        bias = attention.qkv.bias is not None
        self.attention: Any = Attention(
            attention.qkv.in_features, heads_of(attention), qkv_bias=bias, attn_drop=rate
        )
        self.attention.qkv, self.attention.proj = attention.qkv, attention.proj
        self.attention.fused_attn = fused  # type: ignore[misc]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.attention(x)
        return out


def replaced(make: Callable[[Any], nn.Module]) -> Callable[[Subject], Callable[[], None]]:
    """A step of the same model with every attention module replaced."""

    def build(subject: Subject) -> Callable[[], None]:
        model = subject.copy()
        replace_attention(model, make)
        return subject.step(lambda: subject.loss(model(*subject.inputs)))

    return build


def replace_attention(model: nn.Module, make: Callable[[Any], nn.Module]) -> None:
    """Put `make(attention)` in the place of every plain self-attention with a fused qkv map."""
    found = fused_attentions(model)
    if not found:
        raise ValueError(
            "written for attention with one fused qkv map, which this model does not have"
        )
    odd = [n for n, m in found.items() if not _is_plain(m)]
    if odd:
        raise ValueError(f"{odd[0]!r} is more than plain self-attention, which cannot be replaced")
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, make(module))


def _is_plain(module: Any) -> bool:
    """Whether it computes softmax(q k^T) v and nothing else: our class, or timm's without its options."""
    extras = [getattr(module, name, None) for name in ("q_norm", "k_norm", "norm", "gate")]
    return (
        type(module).__name__ in ("SelfAttention", "Attention")
        and not getattr(module, "causal", False)
        and all(m is None or isinstance(m, nn.Identity) for m in extras)
    )


class DroppedBranch(nn.Module):
    """A branch of a block with timm's DropPath behind it."""

    def __init__(self, branch: nn.Module, rate: float) -> None:
        super().__init__()
        from timm.layers import DropPath

        self.branch, self.drop = branch, DropPath(rate)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.drop(self.branch(*args, **kwargs))
        return out


def wrapped(
    names: Collection[str], make: Callable[[Any], nn.Module]
) -> Callable[[Subject], Callable[[], None]]:
    """A step of the same model with every module that its parent calls by one of the names wrapped."""

    def build(subject: Subject) -> Callable[[], None]:
        model = subject.copy()
        parents = [
            m
            for m in model.modules()
            if all(isinstance(getattr(m, n, None), nn.Module) for n in names)
        ]
        if not parents:
            raise ValueError(
                f"written for modules with {' and '.join(names)}, which this model does not have"
            )
        for parent in parents:
            for name in names:
                setattr(parent, name, make(getattr(parent, name)))
        return subject.step(lambda: subject.loss(model(*subject.inputs)))

    return build


ALTERNATIVES = {
    "timm attn_drop, fused": Formulation(
        "drop_attention", replaced(lambda m: TimmAttention(m, 0.1, fused=True))
    ),
    "timm attn_drop, unfused": Formulation(
        "drop_attention", replaced(lambda m: TimmAttention(m, 0.1, fused=False))
    ),
    "nn.MultiheadAttention dropout": Formulation(
        "drop_attention", replaced(lambda m: TorchAttention(m, 0.1))
    ),
    "nn.Dropout before fc1 and fc2": Formulation(
        "feed_forward_dropout",
        wrapped(("fc1", "fc2"), lambda m: nn.Sequential(nn.Dropout(0.1), m)),
    ),
    "timm DropPath": Formulation(
        "drop_path", wrapped(("attn", "mlp"), lambda m: DroppedBranch(m, 0.1))
    ),
}
"""By name, what one would write, and the method of ours that does the same."""
