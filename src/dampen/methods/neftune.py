"""NEFTune: noise on the embeddings while fine-tuning."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dampen.regularizer import Regularizer, UnsupportedModel
from dampen.schedules import Value


class NEFTune(Regularizer):
    """Add uniform noise to the input embeddings in training (arXiv 2310.05914).

    e <- e + alpha / sqrt(n d) * u, u ~ Uniform(-1, 1) per feature, n the valid tokens of the sample
    and d the width, so that the noise of a sample has a norm of about alpha / sqrt(3) whatever its
    length.

    Padded tokens get no noise and do not count in n: padding is read from the model's
    `attention_mask` argument. On images and audio the noise falls on the patch or frame embeddings.
    Differences from the paper: the authors' code, and transformers', count padded tokens in n.
    Instead of transformers' own `neftune_noise_alpha`, never beside it: both would add noise.

    `symmetric=True` is SymNoise (arXiv 2312.01523): u is -1 or 1 with equal probability, and the
    second half of the batch gets the noise of the first with its sign turned. In the paper every
    sample is seen with both signs in one batch of twice the size; here the batch stays as it is.

    Args:
        alpha: how strong; a number, or a schedule over training. The paper takes 5, 10 or 15.
        symmetric: signs instead of uniform noise, in opposite pairs over the batch.

    >>> import torch, dampen
    >>> e = torch.zeros(2, 4, 9)
    >>> bool(dampen.NEFTune(6.0).embeddings(e).abs().max() <= 1.0)  # 6 / sqrt(4 * 9)
    True
    """

    per_sample = True
    acts_first = True
    alpha: Tensor

    def __init__(self, alpha: Value = 5.0, symmetric: bool = False) -> None:
        super().__init__()
        self.symmetric = symmetric
        self.per_sample = not symmetric
        self.scheduled("alpha", alpha, high=math.inf)

    def inspect_model(self, model: nn.Module) -> None:
        hooked = next(
            (n for n, m in model.named_modules() if hasattr(m, "neftune_noise_alpha")), None
        )
        if hooked is not None:
            raise UnsupportedModel(
                f"'{hooked}' has transformers' own noise (neftune_noise_alpha), "
                "and NEFTune would add a second. Leave one of them out."
            )

    def embeddings(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        noise = torch.rand(x.shape, dtype=torch.float32, device=x.device) * 2 - 1
        if self.symmetric:
            half = len(x) // 2
            first = noise[: len(x) - half].sign()
            noise = torch.cat([first, -first[:half]])
        if valid is None:
            # windows and maps too: (B, H, W, D)
            count = torch.full((), max(1, x.shape[1:].numel()), device=x.device)
        else:
            count = (valid.sum(1) * x.shape[-1]).clamp(min=1)[:, None, None]
            noise = noise * valid.unsqueeze(-1)
        # alpha / sqrt(n d) * u
        return x + (noise * (self.alpha / count.float().sqrt())).to(x.dtype)
