"""SkipAblation: a Transformer without its residual connections."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from dampen.names import leave_out
from dampen.regularizer import BranchCall, Regularizer


class SkipAblation(Regularizer):
    """Take the skip connection away from the attention branches, the feed-forward branches, or
    both, in training and in eval.

    x + SA(norm(x)) becomes SA(norm(x)), and norm(x + SA(x)) becomes norm(SA(x)); likewise for the
    feed-forward (Always Skip Attention, arXiv 2505.01996, section 3). The paper: without the
    attention's skip a ViT-Tiny falls from about 92 to 70 % on CIFAR-10, without the feed-forward's
    to about 90. In a decoder block the cross-attention counts as attention.

    Works on every block whose residual additions can be seen (own models, timm, torch.nn, Hugging
    Face; pre-norm and post-norm); a block that adds in some other way raises. The branch continues
    exactly as it is: no residual is added and taken away again. Another method's change of the
    branch stays, so with DropPath a dropped branch is zero. `ConvMixer` has its own `skip=False`.

    Args:
        attention: True removes the skip around attention.
        ffn: True removes the skip around the feed-forward. With both False nothing changes.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.SkipAblation(attention=True))
    >>> reg.clones[0]
    SkipAblation(attention=True, ffn=False)
    """

    in_eval = True
    stochastic = False
    per_sample = True

    def __init__(self, attention: bool = False, ffn: bool = False) -> None:
        super().__init__()
        for name, value in (("attention", attention), ("ffn", ffn)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"SkipAblation({name}=...) is True to remove that skip or False to keep it, "
                    f"got {value!r}."
                )
        self.removed = {"attention": attention, "ffn": ffn}
        self.branch_roles = frozenset(role for role, removed in self.removed.items() if removed)

    def neutral(self) -> None:
        self.removed = dict.fromkeys(self.removed, False)

    example: ClassVar[dict[str, Any]] = {"attention": True}

    @property
    def does_nothing(self) -> bool:
        return not any(self.removed.values())

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        if call.role == "parallel" and len(set(self.removed.values())) > 1:
            raise RuntimeError(
                f"SkipAblation: '{call.site.name if call.site else ''}' adds attention and ffn in "
                "one sum, "
                "side by side: one skip goes around both, and to take it from one would lose the "
                "other. "
                f"Remove both (attention=True, ffn=True), or "
                f"{leave_out(call.site.name if call.site else '')}."
            )
        if self.removed.get("attention" if call.role == "parallel" else call.role):
            call.skip = False
        return b

    def extra_repr(self) -> str:
        return f"attention={self.removed['attention']}, ffn={self.removed['ffn']}"
