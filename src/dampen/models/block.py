"""The parts all small Transformers share: attention, feed-forward, and the two residual blocks made
of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def head_width(width: int, heads: int) -> int:
    """How many channels each head gets, or a clear error.

    Args:
        width: channels of a token.
        heads: attention heads; must divide the width.

    >>> head_width(384, 12)
    32
    """
    if heads < 1 or width < 1 or width % heads:
        fitting = ", ".join(str(h) for h in range(1, width + 1) if width % h == 0)
        raise ValueError(
            f"The width must split evenly over the heads: got width={width}, heads={heads}. "
            f"Choose heads among {fitting or 'the divisors of a positive width'}, or another width."
        )
    return width // heads


def check_padding(padding: Tensor | None, tokens: Tensor) -> None:
    """Raise unless `padding` is a bool mask that fits `tokens` (B, N, ...).

    Args:
        padding: bool (B, N), True on padding; None: no padding.
        tokens: (B, N, ...).
    """
    if padding is None:
        return
    if padding.dtype != torch.bool:
        raise TypeError(
            f"padding must be a bool mask, True where a token is padded: got dtype {padding.dtype}."
        )
    if padding.shape != tokens.shape[:2]:
        raise ValueError(
            f"padding must hold one entry per token: got shape {tuple(padding.shape)} for tokens "
            "of shape "
            f"{tuple(tokens.shape)}; give it shape {tuple(tokens.shape[:2])}."
        )


def visible_keys(padding: Tensor | None) -> Tensor | None:
    """Turn a padding mask (B, M), True = padded, into what attention may see: (B, 1, 1, M), True =
    visible.

    Args:
        padding: bool (B, N), True on padding; None: no padding.
    """
    if padding is None:
        return None
    return ~padding[:, None, None, :]


class SelfAttention(nn.Module):
    """Let every token read every other one, with queries, keys and values from one fused linear
    map.

    Args:
        width: channels of a token.
        heads: attention heads; must divide the width.
        causal: each token sees those before it only.
    """

    def __init__(self, width: int, heads: int, causal: bool = False):
        super().__init__()
        head_width(width, heads)
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        # (B, N, 3D) -> three of (B, H, N, D/H)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=self.causal)
        out: Tensor = self.proj(o.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


class SeparateAttention(nn.Module):
    """Let every token read a memory, which is the tokens themselves if none is given; separate
    projections.

    Args:
        width: channels of a token.
        heads: attention heads; must divide the width.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        head_width(width, heads)
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = self.q_proj(x), self.k_proj(memory), self.v_proj(memory)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        out: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class Mlp(nn.Module):
    """Map each token through one hidden layer.

    Args:
        width: channels of a token.
        hidden: width of the feed-forward.
    """

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """Self-attention then feed-forward, each around a skip; normalized before (default) or after
    the sum.

    `fused=False` keeps separate query, key and value projections.

    Args:
        width: channels of a token.
        heads: attention heads; must divide the width.
        mlp: width of the feed-forward.
        causal: each token sees those before it only.
        norm_first: layer norm before each branch (pre-norm) instead of after the sum.
        fused: one projection for q, k and v.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: int,
        causal: bool = False,
        norm_first: bool = True,
        fused: bool = True,
    ):
        super().__init__()
        if causal and not fused:
            raise ValueError(
                "Block(causal=True, fused=False) has no causal switch: pass a causal `keep` mask "
                "instead."
            )
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(width)
        self.attn = (
            SelfAttention(width, heads, causal) if fused else SeparateAttention(width, heads)
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.attn(self.norm1(x), keep=keep)
            x = x + self.mlp(self.norm2(x))
        else:
            x = self.norm1(x + self.attn(x, keep=keep))
            x = self.norm2(x + self.mlp(x))
        return x


def initialize(model: nn.Module) -> None:
    """Start all linear maps from Xavier's uniform law with zero bias, and embeddings from N(0,
    0.02^2).

    Xavier's law scales with the width, so that one recipe serves a 48-wide and a 384-wide model.

    Args:
        model: started in place.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
