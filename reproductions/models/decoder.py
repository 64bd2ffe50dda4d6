"""The block of the decoders that read a memory: translation and captions."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.models import Mlp, SeparateAttention


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to a memory, then feed-forward, each around a skip."""

    def __init__(self, width: int, heads: int, mlp: int, norm_first: bool = True):
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = SeparateAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.cross_attn = SeparateAttention(width, heads)
        self.norm3 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp)

    def forward(
        self, x: Tensor, memory: Tensor, keep: Tensor, memory_keep: Tensor | None = None
    ) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.norm1(x), keep=keep)
            x = x + self.cross_attn(self.norm2(x), memory, keep=memory_keep)
            x = x + self.mlp(self.norm3(x))
        else:
            x = self.norm1(x + self.self_attn(x, keep=keep))
            x = self.norm2(x + self.cross_attn(x, memory, keep=memory_keep))
            x = self.norm3(x + self.mlp(x))
        return x
