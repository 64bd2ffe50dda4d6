"""`deterministic`: a model without anything random, for a while.

What preference-tuning trainers, teachers and comparisons of gradients need: the model's own dropout and drop path, the
functional calls in its code (`F.dropout`, attention's `dropout_p`) and the regularizers are all silent inside."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import checkpointing_now, in_backward
from dampen.hooks.context import ModelSite
from dampen.hooks.own_dropout import find_own

_DROPOUTS = {
    getattr(home, name)
    for home in (F, torch)
    for name in (
        "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
        "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
    )
    if hasattr(home, name)
}  # fmt: skip
_TRAINING = {f: inspect.signature(f) for f in (F.multi_head_attention_forward, F.rrelu)}
_DRAWS = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm normal normal_ bernoulli bernoulli_ uniform_ "
    "random_ multinomial poisson exponential_ geometric_ cauchy_ log_normal_".split()
)


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Inside, nothing in `model` is random: not its own dropout and drop path, not functional calls, not the
    regularizers, in training mode too. Afterwards, also after an error, everything is exactly as it was.

    With activation checkpointing the backward belongs inside, because it runs the forward again. What draws random
    numbers in another way (a random mask of the input) goes on, and a warning names it.

    >>> model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5)
    >>> x = torch.randn(3, 2, 8)
    >>> with deterministic(model):
    ...     torch.equal(model(x), model(x))
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"deterministic takes an nn.Module, got {type(model).__name__}.")
    rates = [r for r in find_own(model) if r.rate > 0]
    before = [(r, getattr(r.module, r.attribute)) for r in rates]
    silence = _Silence(bool(rates))
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            site = vars(module).get("_dampen_model")
            if isinstance(site, ModelSite):
                stack.enter_context(site.holding("enabled", False))
                silence.silenced = True
        stack.callback(_restore, before)
        for r in rates:
            setattr(r.module, r.attribute, 0.0)
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(silence.enter).remove)
            stack.callback(module.register_forward_hook(silence.leave, always_call=True).remove)
        with silence:
            yield
    silence.report(type(model).__name__)


def _restore(before: list[tuple[Any, Any]]) -> None:
    for r, value in before:
        setattr(r.module, r.attribute, value)


def _would_drop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout (input, p, training) would have dropped anything."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(
        rate > 0 and kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    )


class _Silence(TorchFunctionMode):
    """Turns functional dropout off, and remembers what else was drawn while the model ran."""

    def __init__(self, silenced: bool) -> None:
        super().__init__()
        self.silenced = silenced  # whether anything was random that is not now
        self.depth, self.gradients = 0, False
        self.checkpointed = self.recomputed = False
        self.drawn: set[str] = set()

    def enter(self, module: nn.Module, args: Any) -> None:
        """A forward of one of the model's modules starts.

        Inside `loss.backward()` the mode is off, for that is a torch function too: a checkpoint's recompute opens it
        again."""
        if torch.compiler.is_compiling():
            return
        if self.depth == 0:
            self.gradients = torch.is_grad_enabled()
            if in_backward():
                self.__enter__()  # type: ignore[no-untyped-call]
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has ended, or failed."""
        if torch.compiler.is_compiling():
            return
        self.depth -= 1
        if self.depth == 0 and in_backward():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            self._look(func)
        if func in _DROPOUTS:
            self.silenced = self.silenced or _would_drop(args, kwargs)
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) < 5 else kwargs
            return func(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)
        if func in _TRAINING:
            bound = _TRAINING[func].bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Callable[..., Any]) -> None:
        if in_backward():
            self.recomputed = True
        elif torch.is_grad_enabled():
            self.checkpointed = self.checkpointed or checkpointing_now()
        elif (
            self.depth
            and self.gradients
            and (func in _DROPOUTS or func is F.scaled_dot_product_attention)
        ):
            self.checkpointed = (
                True  # reentrant checkpointing turns gradients off inside a forward that has them
            )
        if self.depth and getattr(func, "__name__", "") in _DRAWS:
            self.drawn.add(func.__name__)

    def report(self, name: str) -> None:
        """At the end: raise where a recompute would be random, warn of what was not silenced."""
        if self.checkpointed and self.silenced and not self.recomputed:
            raise RuntimeError(
                f"{name} ran under activation checkpointing inside deterministic(), and its backward did not: it would "
                "run the forward again with everything random, and give wrong gradients. Put loss.backward() inside "
                "the with block, or run the forward under torch.no_grad() if no gradient is wanted."
            )
        if self.drawn:
            warnings.warn(
                f"{name} drew random numbers inside deterministic() by {', '.join(sorted(self.drawn))}, in its own "
                "code, which is not dropout and was left as it is.",
                stacklevel=3,
            )
