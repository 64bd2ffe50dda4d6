"""A small language model that takes its mask from outside, for the contract that all forms of a
mask mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.checking.subjects import Make, attached, require, same

WIDTH, HEADS, TOKENS, VOCAB = 16, 2, 7, 19
PATHS = ("sdpa", "eager", "mha")
"""How attention is computed: by torch's function, by the model's own softmax(q k^T + mask) v, or by
nn.MultiheadAttention."""


class MaskedAttention(nn.Module):
    """Attention with a mask that is bool (True may be seen) or added to the scores.

    Args:
        eager: the model's own softmax instead of torch's function.
    """

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if not self.eager:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            if mask.dtype is torch.bool:
                s = s.masked_fill(~mask, float("-inf"))
            else:
                s = s + mask
            o = s.softmax(-1) @ v
        out: Tensor = self.proj(o.transpose(1, 2).flatten(2))
        return out


class MaskedBlock(nn.Module):
    """Pre-norm attention and a feed-forward.

    Args:
        path: one of `PATHS`.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn: nn.Module
        if path == "mha":
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        else:
            self.attn = MaskedAttention(eager=path == "eager")
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        if isinstance(self.attn, nn.MultiheadAttention):
            full = mask.expand(x.shape[0], HEADS, x.shape[1], x.shape[1]).flatten(0, 1)
            full = ~full if full.dtype is torch.bool else full
            x = x + self.attn(y, y, y, attn_mask=full, need_weights=False)[0]
        else:
            x = x + self.attn(y, mask)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class MaskedModel(nn.Module):
    """Logits of tokens under a given mask.

    Args:
        path: one of `PATHS`.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock(path) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(x)
        return out


def forms_of(seen: Tensor, dtype: torch.dtype, brief: bool = False) -> dict[str, Tensor]:
    """A bool mask in all its forms, or in three.

    Args:
        seen: bool, True where a key may be seen.
        dtype: of the float masks, or of the model.
        brief: fewer forms of a mask.
    """
    lows = {
        "-inf": -math.inf,
        "the smallest number": torch.finfo(dtype).min,
        "the smallest number of float16": torch.finfo(torch.float16).min,
        "-1e9": -1e9,
        "-1e4": -1e4,
        "-100": -100.0,
    }
    if brief:
        lows = {name: lows[name] for name in ("-1e9", "-100")}
    nothing = torch.zeros(seen.shape, dtype=dtype)
    return {"bool": seen} | {name: nothing.masked_fill(~seen, low) for name, low in lows.items()}


def scenes() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor], Tensor, bool]]:
    """Masks, each with a function that changes what must not be seen of the ids (3, TOKENS), the
    positions (3, TOKENS) whose outputs may not move then, and whether what is hidden is padding,
    which no penalty may count."""
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    real[1, 5:], real[2, 3:] = False, False
    early = (torch.arange(TOKENS) < 4).expand(3, -1)

    def other(where: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda ids: torch.where(where, (ids + 7) % VOCAB, ids)

    return {
        "causal": (causal, other(~early), early, False),
        "padded": (real[:, None, None], other(~real), real, True),
        "causal and padded": (causal & real[:, None, None], other(~real), real, True),
    }


def ids() -> Tensor:
    """A batch of tokens."""
    return torch.randint(1, VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(1))


def build(path: str, dtype: torch.dtype) -> nn.Module:
    """The model, the same each time.

    Args:
        path: one of `PATHS`.
        dtype: of the float masks, or of the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MaskedModel(path).to(dtype).train()


def logits(out: Any) -> Tensor:
    """What the model gives is its logits.

    Args:
        out: what the model returned.
    """
    found: Tensor = out
    return found


def check_forms(makes: Sequence[Make], brief: bool = False) -> None:
    """In float64, where all forms take one path, the draws are the same; in float32 a native kernel
    may run too. `brief`: three forms of the mask that is both causal and padded.

    Args:
        makes: one per regularizer.
        brief: fewer forms of a mask.
    """
    chosen = {
        name: scene for name, scene in scenes().items() if not brief or name == "causal and padded"
    }
    for path in PATHS:
        for scene, (seen, change, kept, padded) in chosen.items():
            where = f"{path}, {scene}"
            expected = None
            for form, mask in forms_of(seen, torch.float64, brief).items():
                found = _masked_step(makes, path, ids(), mask, kept)
                expected = found if expected is None else expected
                same(found[0][kept], expected[0][kept], f"{where}: outputs, {form} and bool", 1e-9)
                _same_terms(found[1], expected[1], f"{where}: {form} and bool", 1e-9)
            for form, mask in forms_of(seen, torch.float32, brief).items():
                before = _masked_step(makes, path, ids(), mask, kept, torch.float32)
                after = _masked_step(makes, path, change(ids()), mask, kept, torch.float32)
                same(
                    after[0][kept],
                    before[0][kept],
                    f"{where}: outputs after changing what {form} hides",
                    1e-6,
                )
                if padded:
                    _same_terms(
                        after[1], before[1], f"{where}: after changing what {form} hides", 1e-6
                    )


def _masked_step(
    makes: Sequence[Make],
    path: str,
    ids: Tensor,
    mask: Tensor,
    valid: Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(path, dtype)
    reg = attached(model, [make() for make in makes], strict=False)
    torch.manual_seed(2)
    seen: list[Tensor] = []

    def forward() -> Tensor:
        seen.append(model(ids, mask))
        return seen[-1]

    _, terms = reg.loss(forward, lambda out: out.square().mean(), valid=valid)
    return seen[0].detach(), {
        name: value.detach() for name, value in terms.items() if name != "task"
    }


def _same_terms(a: dict[str, Tensor], b: dict[str, Tensor], message: str, tolerance: float) -> None:
    require(
        a.keys() == b.keys(), f"{message}: the terms {sorted(a.keys() ^ b.keys())} exist only once"
    )
    for name in a:
        same(a[name], b[name], f"{message}: the term {name}", tolerance)
