"""InputMasking: hide input tokens of a language model while it is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dampen.masks import few_kept
from dampen.regularizer import Regularizer
from dampen.schedules import Value

SPECIAL = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "cls", "sep", "mask", "unk"))


class InputMasking(Regularizer):
    """Hide random input tokens from the model, which still predicts every token: mask-enhanced
    autoregressive prediction (MEAP, arXiv 2502.07490), for decoders and encoders.

    e_i <- 0 with probability p, e the output of the input embedding, before positions; the labels
    stay. Special and padded tokens are never hidden: the ids of the model's config, or `special`.

    `two_pass=True` (arXiv 2606.06888) keeps the plain pass: L = CE(f(x), y) + weight CE(f(m(x)),
    y), one forward on the whole input and one on the masked input. It needs `reg.loss`.

    Differences from the papers: they put a mask token into the input, here its embedding is zero,
    so that a model without a mask token needs none. On images and audio it hides patches or frames.

    Args:
        rate: probability to hide a token. MEAP takes 0.15.
        two_pass: one pass on the whole input and one on the masked input.
        weight: of the loss on the masked input, with `two_pass`.
        special: ids that are never hidden; by default those of the model's config.

    >>> import torch, dampen
    >>> e = torch.ones(2, 6, 4)
    >>> hidden = dampen.InputMasking(0.5).embeddings(e)
    >>> bool(((hidden == 0) | (hidden == 1)).all())
    True
    """

    reads_ids = True
    rate: Tensor
    weight: Tensor

    def __init__(
        self,
        rate: Value = 0.15,
        two_pass: bool = False,
        weight: Value = 1.0,
        special: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.two_pass, self.special = two_pass, special
        self.per_sample = not two_pass
        self.passes = 2 if two_pass else 1  # type: ignore[misc]
        self.scheduled("rate", rate)
        self.scheduled("weight", weight, high=math.inf)

    def _is_idle(self) -> bool:
        return self.zero_is_identity and not self.two_pass and not self._numbers.get("rate")

    def inspect_model(self, model: nn.Module) -> None:
        if self.special is None:
            configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
            given = [getattr(c, name, None) for c in configs for name in SPECIAL]
            # several ids of one kind are a list, as the ends of text of Llama 3
            found = [i for ids in given for i in (ids if isinstance(ids, list | tuple) else [ids])]
            self.special = sorted({i for i in found if isinstance(i, int)})

    def pass_weights(self) -> tuple[float | Tensor, ...] | None:
        """The factors of the task losses of a step's passes."""
        return (1.0, self.current("weight")) if self.two_pass else None

    def embeddings(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if self.two_pass and self.turn == 0:
            return x
        shape = x.shape[: min(x.ndim - 1, 2)]
        kept = few_kept(shape, self.current("rate"), x.device) != 0
        if valid is not None:
            kept = kept | ~valid
        ids = self.input_ids
        if ids is not None and ids.shape == shape and self.special:
            kept = kept | torch.isin(ids, torch.tensor(self.special, device=ids.device))
        return x * kept.view(*shape, *[1] * (x.ndim - len(shape))).to(x.dtype)

    def extra_repr(self) -> str:
        if self.two_pass:
            return super().extra_repr()
        return f"rate={self.rate.item():.3g}"
