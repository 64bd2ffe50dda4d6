"""Token Graying: a better conditioned input for the first attention."""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import Tensor, nn

from dampen.functional.graying import (
    DEFAULT_EPS,
    Kind,
    check_eps,
    check_kind,
    gray_images,
    gray_tokens,
)
from dampen.functional.grid import pair
from dampen.regularizer import Regularizer, UnsupportedModel

_PATCHES = re.compile(r"patch_?embed|patch_?conv|conv_proj", re.IGNORECASE)


class TokenGraying(Regularizer):
    """Flatten the spectrum of an image's patch tokens before the patch embedding, per sample, in
    training and in eval.

    With X (N, D) the patches of one image (Always Skip Attention, arXiv 2505.01996, section 5):
    `kind="svd"`: X = U S V^T, X' = U (S / max S)^eps V^T, so that kappa(X') = kappa(X)^eps;
    `kind="dct"`: c the 2-D orthonormal DCT of X, c' = sign(c) (|c| / max |c|)^eps, X' its inverse.

    Differences from the paper: the paper does not publish the DCT's amplification, the formula
    above is ours; max S (max |c|) is
        multiplied back
    (`restore_scale=True`), so that the model sees pixels of the usual size; the SVD runs through
    `eigh` of the smaller Gram matrix in float64 with a floor on tiny eigenvalues. A masked
    autoencoder sees, and reconstructs, the grayed image. ONNX has no `eigh`: export the dct kind,
    or gray the images outside the model with `dampen.functional.graying.GrayImages`, which is also
    the way to do it once per image in the data loader.

    Args:
        kind: dct (the paper's +1 % training time) or svd (6.3x in the paper; see
            benchmarks/skip_cost.py for ours).
        eps: in (0, 1], 1 changes nothing; by default 0.95 for dct and 0.7 for svd.
        restore_scale: multiply the largest singular value, or coefficient, back.
        patch_size: found in the model's patch embedding by default; "tokens" if the model takes
            unpadded tokens (B, N, D) instead of pixels.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.TokenGraying("svd"))
    >>> reg.clones[0]
    TokenGraying(kind=svd, eps=0.7, patch_size=(4, 4))
    """

    in_eval = True
    stochastic = False
    per_sample = True

    def __init__(
        self,
        kind: Kind = "dct",
        eps: float | None = None,
        restore_scale: bool = True,
        patch_size: int | tuple[int, int] | Literal["tokens"] | None = None,
    ) -> None:
        super().__init__()
        self.kind = check_kind(kind)
        self.eps = check_eps(DEFAULT_EPS[kind] if eps is None else eps)
        self.restore_scale = restore_scale
        self.patch_size = (
            patch_size
            if patch_size is None or patch_size == "tokens"
            else check_patch_size(patch_size)
        )

    def inspect_model(self, model: nn.Module) -> None:
        if self.patch_size is None:
            self.patch_size = find_patch_size(model)

    def neutral(self) -> None:
        self.eps, self.restore_scale = 1.0, True

    def inputs(self, x: Tensor) -> Tensor:
        if self.patch_size is None:
            raise RuntimeError(
                "TokenGraying does not know the patch size. Attach it with dampen.regularize, or "
                "give patch_size=."
            )
        if self.patch_size == "tokens":
            return gray_tokens(x, self.kind, self.eps, self.restore_scale)
        return gray_images(x, self.patch_size, self.kind, self.eps, self.restore_scale)

    def extra_repr(self) -> str:
        scale = "" if self.restore_scale else ", restore_scale=False"
        if self.patch_size is None:
            patches = ""
        else:
            patches = f", patch_size={self.patch_size}"
        return f"kind={self.kind}, eps={self.eps:.3g}{scale}{patches}"


def find_patch_size(model: nn.Module) -> tuple[int, int]:
    """The patch size of a vision model's patch embedding: its first convolution, if that one cuts
    the image into patches.

    An overlapping patch embedding (PVTv2) counts by its stride. A linear one is known by its
    `patch_size`.

    Args:
        model: a vision model.

    >>> import dampen
    >>> sizes = dict(image_size=(8, 16), patch_size=(2, 4), width=8, depth=1, heads=2, mlp=8)
    >>> find_patch_size(dampen.models.ViT(**sizes))
    (2, 4)
    """
    convolutions = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    name, first = next(convolutions, ("", None))
    if first is not None:
        stride = (int(first.stride[0]), int(first.stride[1]))
        if max(stride) > 1 and (tuple(first.kernel_size) == stride or _PATCHES.search(name)):
            return stride
    else:
        for owner in (*model.modules(), getattr(model, "config", None)):
            size = getattr(owner, "patch_size", None)
            if isinstance(size, int) or (isinstance(size, tuple | list) and len(size) == 2):
                return check_patch_size(tuple(size) if isinstance(size, list) else size)
    if first is None:
        found = "it has no convolution"
    else:
        found = f"its first convolution, '{name}', is {first}"
    raise UnsupportedModel(
        f"TokenGraying acts on the patches of images, but {type(model).__name__} has "
        f"no patch embedding that shows their size: {found}. Give patch_size=(height, "
        "width), or patch_size='tokens' if the model takes tokens (B, N, D)."
    )


def check_patch_size(size: Any) -> tuple[int, int]:
    """A patch size as (height, width), or an error.

    Args:
        size: one number or (height, width).
    """
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or any(
        isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sides
    ):
        raise ValueError(
            f"TokenGraying: patch_size is a positive integer, (height, width) or 'tokens', got "
            f"{size!r}."
        )
    return pair((sides[0], sides[1]))
