"""A model with regularizers in it, run the same way for every contract, and what contracts
compare."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.checking.subjects import Subject
from dampen.handle import Handle, regularize
from dampen.methods.drop_key import DropKey
from dampen.regularizer import Regularizer


class ContractBroken(AssertionError):
    """A regularizer does not keep what every regularizer promises."""


def require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise ContractBroken(message)


def same(a: Tensor, b: Tensor, message: str, tolerance: float | None = 0.0) -> None:
    """Equal to the bit (tolerance 0), or close.

    Args:
        a: one.
        b: the other.
        message: of the error.
        tolerance: relative and absolute; 0: equal to the bit.
    """
    require(a.shape == b.shape, f"{message}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if tolerance == 0.0:
        require(torch.equal(a, b), f"{message}: they differ by up to {_gap(a, b):.3g}")
    else:
        require(
            torch.allclose(a, b, rtol=tolerance or 0, atol=tolerance or 0),
            f"{message}: off by up to {_gap(a, b):.3g}",
        )


def same_gradients(
    a: dict[str, Tensor], b: dict[str, Tensor], message: str, tolerance: float = 1e-5
) -> None:
    require(
        a.keys() == b.keys(),
        f"{message}: gradients of {sorted(a.keys() ^ b.keys())} exist only once",
    )
    for name in a:
        same(a[name], b[name], f"{message}: gradient of {name}", tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    if a.numel():
        return (a.double() - b.double()).abs().max().item()
    return 0.0


Make = Callable[[], Regularizer]


def attached(model: nn.Module, methods: Sequence[Regularizer], **options: Any) -> Handle:
    """The handle of a model with methods, which may be of one class: contracts pair a method with itself.

    Args:
        model: what to regularize.
        methods: the regularizers, to which a companion is added where one needs it.
        options: for `regularize`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "regularize got .* times", UserWarning)
        return regularize(model, with_companion(list(methods)), **options)


class Attached:
    """A subject's model with regularizers attached, and one training step of it.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
        neutral: every rate and coefficient is 0.
    """

    def __init__(
        self, make: Make | Sequence[Make], subject: Subject, neutral: bool = False
    ) -> None:
        self.subject, self.model, self.inputs = subject, subject.model(), subject.inputs()
        makes = [make] if callable(make) else list(make)
        self.reg: Handle = attached(self.model, [m() for m in makes])
        self.reg.attach_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        # contracts compare draw by draw with compiled graphs and plain calls; a doubled batch draws
        # in another order
        self.reg.prefix.doubled.why = "a contract compares two passes draw by draw"
        if neutral:
            for clone in self.reg.clones:
                # the formula at 0 is looked at, not that it is left out
                clone.zero_is_identity = False
                clone.neutral()

    def step(
        self,
        inputs: dict[str, Tensor] | None = None,
        seed: int = 2,
        run: Callable[..., Any] | None = None,
        backward: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, terms and the logits of the first pass, after a backward."""
        inputs = self.inputs if inputs is None else inputs
        run = self.model if run is None else run
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        seen: list[Tensor] = []

        def forward() -> Any:
            out = run(**inputs)
            seen.append(self.subject.logits(out))
            return out

        loss, terms = self.reg.loss(
            forward,
            lambda out: task_loss(self.subject.logits(out)),
            logits=self.subject.logits,
            valid=valid_of(inputs),
        )
        if backward:
            loss.backward()
        return loss.detach(), {k: v.detach() for k, v in terms.items()}, seen[0].detach()

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients now in the model."""
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def copy(self) -> Attached:
        """An independent copy, model and handle together."""
        twin = copy.deepcopy(self)
        twin.reg.attach_optimizer(torch.optim.SGD(twin.model.parameters(), lr=0.1))
        return twin


def with_example(make: Make) -> Make:
    """A class that has no effect by default, with its example's arguments; the
    rest stays.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
    """
    if isinstance(make, type) and issubclass(make, Regularizer) and make.example:
        return functools.partial(make, **make.example)
    return make


def with_companion(methods: list[Regularizer]) -> list[Regularizer]:
    """Methods that compare two passes need something that differs between them.

    Args:
        methods: regularizers to attach.
    """
    if any(m.passes > 1 and not m.stochastic for m in methods) and not any(
        m.stochastic and m.passes == 1 for m in methods
    ):
        return [*methods, DropKey(0.2)]
    return methods


def task_loss(logits: Tensor) -> Tensor:
    """A cross entropy with fixed labels.

    Args:
        logits: of the model.
    """
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % flat.shape[-1])


def valid_of(inputs: dict[str, Tensor]) -> Tensor | None:
    """The positions that are not padding, where the batch says so.

    Args:
        inputs: one batch of the subject.
    """
    if "attention_mask" in inputs:
        return inputs["attention_mask"].bool()
    return None


def plain_logits(subject: Subject, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a model gives, without gradient.

    Args:
        subject: the model to try it on.
        model: of the subject.
        inputs: one batch of the subject.
    """
    with torch.no_grad():
        return subject.logits(model(**inputs))
