"""PatchDropout: train on a random part of the patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dampen.methods.drop_path import batch_axis
from dampen.regularizer import Regularizer, UnsupportedModel
from dampen.schedules import Value


class PatchDropout(Regularizer):
    """Keep a random subset of the patch tokens, drawn per sample before the first block, and all
    prefix tokens (arXiv 2208.07220).

    x <- x[kept], |kept| = round((1 - p) N), in their order. Positions are in the tokens already, so
    the model needs nothing else; all later layers see fewer tokens and cost less.

    For models whose tokens are patches with positions in them. Text models are refused, and a block
    that gets anything else per token (a mask, rotary angles) raises, because it would no longer
    fit. The number of tokens is a shape, so each one is a compiled graph of its own: with
    `torch.compile` use a constant rate or one with few values.

    Args:
        rate: share of the patches to drop. The paper keeps half.
        prefix: tokens before the patches that always stay (CLS, registers); by default what the
            model says in `num_prefix_tokens`, else 1.

    >>> import torch, dampen
    >>> dampen.PatchDropout(0.5, prefix=1).tokens(torch.randn(2, 65, 8)).shape
    torch.Size([2, 33, 8])
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.5, prefix: int | None = None) -> None:
        super().__init__()
        if prefix is not None and (
            isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 0
        ):
            raise ValueError(
                f"PatchDropout: prefix is a number of tokens, 0 or more, got {prefix!r}."
            )
        self.prefix = prefix
        # the rate as a number: it decides a shape
        self.share = 0.0
        self.scheduled("rate", rate)

    def inspect_model(self, model: nn.Module) -> None:
        vocabulary = [
            n
            for n, m in model.named_modules()
            if isinstance(m, nn.Embedding) and "pos" not in n.lower()
        ]
        if vocabulary and not any(
            isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in model.modules()
        ):
            raise UnsupportedModel(
                f"PatchDropout drops patches, but {type(model).__name__} reads a vocabulary "
                f"('{vocabulary[0]}'): its "
                "masks and positions would no longer fit the tokens. Use DropKey(unit='column') "
                "for text."
            )
        if self.prefix is None:
            stated = [getattr(m, "num_prefix_tokens", None) for m in model.modules()]
            self.prefix = next((n for n in stated if isinstance(n, int)), 1)

    def at(self, progress: float) -> None:
        super().at(progress)
        self.share = self._schedules["rate"][0](
            0.0 if self.site is None else self.site.depth, progress
        )

    def tokens(self, x: Tensor) -> Tensor:
        if x.ndim != 3:
            raise ValueError(
                f"PatchDropout takes tokens (B, N, D), got {tuple(x.shape)}. Drop windowed tokens "
                "yourself."
            )
        if batch_axis(self) == 1:
            return self._keep_some(x.transpose(0, 1)).transpose(0, 1)
        return self._keep_some(x)

    def _keep_some(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        prefix = 1 if self.prefix is None else self.prefix
        patches = tokens - prefix
        if patches < 1:
            raise ValueError(
                f"PatchDropout keeps {prefix} prefix tokens, but there are only {tokens} tokens."
            )
        count = max(1, round((1 - self.share) * patches))
        draws = torch.rand(batch, patches, dtype=torch.float32, device=x.device)
        drawn = draws.argsort(-1)[:, :count].sort(-1).values
        first = torch.arange(prefix, device=x.device).expand(batch, -1)
        kept = torch.cat([first, prefix + drawn], dim=1)
        rows = kept + tokens * torch.arange(batch, device=x.device).unsqueeze(-1)
        return (
            x.reshape(batch * tokens, -1)
            .index_select(0, rows.flatten())
            .view(batch, -1, x.shape[-1])
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.prefix is None else f", prefix={self.prefix}")
