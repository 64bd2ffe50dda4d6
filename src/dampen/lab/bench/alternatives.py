"""What one would pick without this package: ordinary attention dropout, as timm and torch.nn offer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dampen.lab.bench.papers import fused_attentions, heads_of
from dampen.lab.bench.subject import Subject


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` with the weights of an attention that has one fused qkv map."""

    def __init__(self, attention: Any, rate: float) -> None:
        super().__init__()
        width = attention.qkv.in_features
        bias = attention.qkv.bias is not None
        self.attention = nn.MultiheadAttention(width, heads_of(attention), rate, bias=bias, batch_first=True)
        self.attention.in_proj_weight, self.attention.in_proj_bias = attention.qkv.weight, attention.qkv.bias
        self.attention.out_proj.weight, self.attention.out_proj.bias = attention.proj.weight, attention.proj.bias

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class TimmAttention(nn.Module):
    """timm's `Attention` with the weights of an attention that has one fused qkv map."""

    def __init__(self, attention: Any, rate: float, fused: bool) -> None:
        super().__init__()
        from dampen._torch import cure_torchvision

        cure_torchvision()
        from timm.layers import Attention

        bias = attention.qkv.bias is not None
        self.attention: Any = Attention(attention.qkv.in_features, heads_of(attention), qkv_bias=bias, attn_drop=rate)
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
        raise ValueError("written for attention with one fused qkv map, which this model does not have")
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


INSTEAD_OF = "drop_attention"
"""What of ours does what the alternatives do."""
ALTERNATIVES: dict[str, Callable[[Subject], Callable[[], None]]] = {
    "timm attn_drop, fused": replaced(lambda m: TimmAttention(m, 0.1, fused=True)),
    "timm attn_drop, unfused": replaced(lambda m: TimmAttention(m, 0.1, fused=False)),
    "nn.MultiheadAttention dropout": replaced(lambda m: TorchAttention(m, 0.1)),
}
