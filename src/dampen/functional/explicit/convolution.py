"""The penalty of dropout on the input of a convolution, through unfolded patches (arXiv
2604.20505).

    b = sum conv(x, W)^2        v = sum conv(x^2, W^2)

A convolution is a linear layer on patches, and an output position is its token; a transposed one
is, too, on the inputs that reach a position. Nothing is unfolded: b is read off the output, and v
is one convolution with a single channel per group, because only the sum over output channels of W^2
is needed.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import convolve, is_empty
from dampen.calls import Penalties
from dampen.deprecated import accepts_old_arguments
from dampen.functional.explicit.reductions import (
    Number,
    check_form,
    check_reduction,
    combine,
    is_off,
    no_autocast,
    single,
    token_rows,
    wide,
)
from dampen.functional.explicit.squares import squared_norm
from dampen.regularizer import LINEAR_STAGES, Regularizer, Site
from dampen.schedules import Value, check_progress

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed
KINDS = "nn.Conv1d, nn.Conv2d, nn.Conv3d or a transposed one"


def convolution_penalty(
    x: Tensor,
    module: Convolution,
    rate: Number,
    *,
    form: str = "paper",
    reduction: str = "mean",
    output: Tensor | None = None,
) -> Tensor:
    """The penalty of dropout on the input of a convolution of one to three axes, transposed or not,
    grouped, strided, dilated or padded.

    Args:
        x: the input (B, C, ...) or (C, ...) of the convolution.
        module: the convolution. Its bias is not in the penalty.
        rate: p.
        form: paper, exact or inverted.
        reduction: mean (over all output positions), sum, token_mean (over each sample's positions)
            or author.
        output: what the module gave, if the forward has it already. A transposed convolution that
            was called with an `output_size` needs it, because the size is read off it.

    >>> import torch
    >>> from torch import nn
    >>> conv = nn.Conv1d(1, 1, 2, bias=False)
    >>> _ = conv.weight.data.fill_(1.0)
    >>> convolution_penalty(torch.ones(1, 1, 4), conv, 0.5, form="exact").item()
    0.75
    """
    check_form(form, "convolution_penalty")
    check_reduction(reduction, "convolution_penalty")
    if not isinstance(module, Convolution):
        raise TypeError(f"convolution_penalty takes {KINDS}, got {type(module).__name__}.")
    if x.ndim == module.weight.ndim - 1:
        x, output = x.unsqueeze(0), None if output is None else output.unsqueeze(0)
    with no_autocast(x.device.type):
        factors = single(form, rate)
        weight = wide(module.weight)
        if output is None or module.bias is None:
            bias = None
        else:
            bias = module.bias.unsqueeze(1)
        size = None if output is None else output.shape[2:]
        b = v = None
        if factors.bias is not None:
            # may change in place
            if output is None:
                output = _apply(module, wide(x), weight, size)
            else:
                output = output.clone()
            b, positions = squared_norm(output.flatten(2), bias, None), output.shape[2:].numel()
        # summed over the output channels of each group: (B, groups, ...)
        if factors.variance is not None:
            squares = weight.square()
            if isinstance(module, Transposed):  # (in, out / groups, ...)
                columns = squares.sum(1, keepdim=True)
            else:
                columns = squares.unflatten(0, (module.groups, -1)).sum(1)
            per_position = _apply(module, wide(x).square(), columns, size)
            v, positions = per_position.sum(), per_position.shape[2:].numel()
        return combine(factors, b, v) * token_rows(reduction, x.shape[0], positions, None).factor


def _apply(module: Convolution, x: Tensor, weight: Tensor, size: torch.Size | None) -> Tensor:
    """The convolution with another weight and no bias; a transposed one to the given size, if it
    has one."""
    if not isinstance(module, Transposed):
        return convolve(module, x, weight)
    transposed = getattr(torch.nn.functional, f"conv_transpose{x.ndim - 2}d")
    extra = tuple(module.output_padding)
    # what `output_size` may have requested beyond the smallest size
    if size is not None:
        axes = zip(
            size,
            x.shape[2:],
            module.stride,
            module.padding,
            module.dilation,
            module.kernel_size,
            strict=True,
        )
        extra = tuple(
            out - ((n - 1) * s - 2 * int(p) + d * (k - 1) + 1) for out, n, s, p, d, k in axes
        )
    out: Tensor = transposed(
        x, weight, None, module.stride, module.padding, extra, module.groups, module.dilation
    )
    return out


class _ConvolutionDropout(Regularizer):
    """The clone of one convolution: schedules and the slot of its penalty. Its method is a forward
    hook."""

    stochastic = False
    weight: Tensor
    rate: Tensor

    def __init__(self, weight: Value, rate: Value, form: str, reduction: str) -> None:
        super().__init__()
        check_form(form, "regularize_convolutions")
        check_reduction(reduction, "regularize_convolutions")
        self.scheduled("weight", weight, high=math.inf)
        self.scheduled("rate", rate)
        self.form, self.reduction = form, reduction

    @property
    def name(self) -> str:
        return "explicit_dropout"

    def after(self, module: Convolution, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook."""
        if module.training and not is_empty(args[0]):
            clean = None if is_changed(module) else output
            value = convolution_penalty(
                args[0], module, self.rate, form=self.form, reduction=self.reduction, output=clean
            )
            self.penalize(self.weight * value, "convolution")


def is_changed(module: nn.Module) -> bool:
    """Whether methods of `regularize` change what a convolution gives: the 1 x 1 convolutions of an
    attention or of a feed-forward are linear layers.

    Args:
        module: a convolution.
    """
    site = vars(module).get("_dampen_linear")
    return site is not None and any(
        not r.only_reads and site.role in r.roles and r.stages & set(LINEAR_STAGES)
        for r in site.layer.active(module)
    )


class ConvolutionPenalties:
    """What `regularize_convolutions` returns: progress goes in, the penalty comes out.

    Args:
        model: the model.
        clones: by name of the convolution.
        hooks: to remove at the end.
        strict: raise where penalties were left out of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        clones: dict[str, _ConvolutionDropout],
        hooks: list[Any],
        strict: bool,
    ) -> None:
        self.clones, self._hooks = clones, hooks
        self._ledger = Penalties(model, clones.values(), strict)

    def progress(self, t: float) -> None:
        """Set the schedules to the progress of training, in [0, 1].

        Args:
            t: share of training that is done, in [0, 1].
        """
        for clone in self.clones.values():
            clone.at(check_progress(t))

    def penalty(self) -> Tensor:
        """The sum of the penalties made since they were last taken: `loss = task +
        convolutions.penalty()`. Both forwards of a siamese step count, as in `regularize`; those in
        eval and under `no_grad` add nothing."""
        values = [v for clone in self.clones.values() for v in clone.take_penalties().values()]
        self._ledger.taken()
        if values:
            return sum(values[1:], start=values[0])
        return torch.zeros((), dtype=torch.float32)

    def remove(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._ledger.unwatch()


@accepts_old_arguments
def regularize_convolutions(
    model: nn.Module,
    weight: Value = 0.05,
    rate: Value = 0.2,
    *,
    form: str = "paper",
    reduction: str = "mean",
    target_modules: str | Sequence[str] = "*",
    strict: bool = True,
) -> ConvolutionPenalties:
    """Give the convolutions of a model, transposed ones too, the penalty of Explicit Dropout, by
    forward hooks.

    Args:
        model: any model.
        weight: lambda; a number, a schedule, or one value per convolution.
        rate: p of the dropout that the penalty replaces.
        form: paper, exact or inverted.
        reduction: mean, sum, token_mean or author.
        target_modules: pattern(s) of dotted names of the convolutions, as in
            `"stages.[0-1].*"`.
        strict: raise where penalties were left out of the loss (a backward ran while they waited).

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    >>> convolutions = regularize_convolutions(model, weight=0.1)
    >>> out = model(torch.randn(2, 3, 8, 8))
    >>> (out.square().mean() + convolutions.penalty()).backward()
    >>> convolutions.remove()
    """
    patterns = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    every = {n: m for n, m in model.named_modules() if isinstance(m, Convolution)}
    found = {n: m for n, m in every.items() if any(fnmatch.fnmatch(n, p) for p in patterns)}
    if not found:
        raise ValueError(
            f"no convolution of {type(model).__name__} matches target_modules={target_modules!r}. "
            f"Convolutions found: {', '.join(every) or 'none'}."
        )
    clones: dict[str, _ConvolutionDropout] = {}
    for index, name in enumerate(found):
        clone = _ConvolutionDropout(weight, rate, form, reduction)
        clone.place(Site(name, index, len(found)))
        clone.neighbors = [found[name]]
        clones[name] = clone
    hooks = []
    for name, clone in () if is_off(weight) else clones.items():
        hooks.append(found[name].register_forward_hook(clone.after))
        clone.to(found[name].weight.device)
    return ConvolutionPenalties(model, clones, hooks, strict)
