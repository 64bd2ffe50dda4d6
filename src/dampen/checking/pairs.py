"""Contracts of two methods side by side: their order does not matter, and a penalty reads clean
operands.

What a method does to one layer changes the input of the next, and with it every penalty behind:
that is as it should be. So a penalty beside another method is compared with the penalty alone on
the same layer inputs: a first run, with both methods, keeps what went into and came out of every
module without children; a second run, with one of the two, is fed the same. All these tensors are
cut from the graph, so that gradients stay within one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dampen import methods
from dampen._torch import pytree
from dampen.checking.subjects import (
    Attached,
    Make,
    Subject,
    require,
    same,
    same_gradients,
    with_example,
)
from dampen.regularizer import UnsupportedModel

COMPANIONS: dict[str, Make] = {
    "weights of linear layers": functools.partial(methods.DropConnect, 0.3, targets="all"),
    "inputs of linear layers": functools.partial(methods.FeedForwardDropout, 0.3),
    "keys": functools.partial(methods.DropKey, 0.3),
    "scores": functools.partial(methods.BlurredAttention, 5, 1.0),
    "attention weights": functools.partial(methods.DropAttention, 0.3, normalized=False),
    "heads": functools.partial(methods.DropHead, 0.4),
    "branches": functools.partial(methods.HiddenDropout, 0.3),
    "penalties": functools.partial(
        methods.ExplicitDropout, query=0.3, value=0.2, ffn=0.4, output=0.1
    ),
}
"""One method for each kind of place that methods act on, to be put beside the one that is checked.
"""

_UPSTREAM = {"tokens", "outputs", "task"}
"""Methods with these stages change how many tokens there are, or compare whole outputs: nothing is
the same layer input with and without them."""


_ADVICE = (
    "A penalty reads what no other method has changed: a method that draws nothing says stochastic "
    "= False, so that it "
    "runs first; its stages read what they are given, `call.input` and `call.weight`"
)


def order(make: Make, subject: Subject) -> None:
    """16. The order in which two methods are given does not matter: the same draws, outputs,
    penalties, gradients.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    for other in COMPANIONS.values():
        _skip_refused(order_of_two, make, other, subject)


def beside(make: Make, subject: Subject) -> None:
    """17. Beside another method every penalty is what it is alone on the same layer inputs, and so
    are its gradients; two methods' penalties add up; a method that only reads changes nothing that
    another one draws.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    for other in COMPANIONS.values():
        _skip_refused(penalties_of_two, make, other, subject)


def order_of_two(first: Make, second: Make, subject: Subject) -> None:
    """Two methods in both orders: one seed gives the same.

    Args:
        first: makes one regularizer.
        second: makes the other.
        subject: the model to try it on.
    """
    a, b = (
        Attached([with_example(m) for m in makes], subject)
        for makes in ((first, second), (second, first))
    )
    for trial in (a, b):
        _move_weights(trial.model)
    (_, terms, logits), (_, moved, changed) = a.step(), b.step()
    if first is not second:
        who = f"{first().name} and {second().name}"
    else:
        who = f"two {first().name}"
    same(changed, logits, f"{who}: the output in one order and in the other")
    require(
        terms.keys() == moved.keys(),
        f"{who}: penalties {sorted(terms.keys() ^ moved.keys())} in one order only",
    )
    for name in terms:
        same(
            moved[name], terms[name], f"{who}: the term {name} in one order and in the other", 1e-6
        )
    same_gradients(
        _model_gradients(b), _model_gradients(a), f"{who}: in one order and in the other", 1e-5
    )


def penalties_of_two(first: Make, second: Make, subject: Subject) -> None:
    """Two methods together, and each of them on the layer inputs that both left.

    Args:
        first: makes one regularizer.
        second: makes the other.
        subject: the model to try it on.
    """
    makes = [with_example(first), with_example(second)]
    apart = [make() for make in makes]
    if any(r.stages & _UPSTREAM or r.passes > 1 or (r.only_reads and r.stochastic) for r in apart):
        return
    tape = _Tape()
    together = _run(makes, subject, tape)
    alone = [_run([make], subject, tape.again()) for make in makes]
    names = " and ".join(r.name for r in apart)
    expected: dict[str, Tensor] = {}
    for run in alone:
        for name, value in run.terms.items():
            expected[name] = expected.get(name, 0.0) + value
    require(
        together.terms.keys() == expected.keys(),
        f"{names}: the penalties are {sorted(together.terms)}",
    )
    for name, value in together.terms.items():
        what = f"{names}: the penalty {name} together, and the sum of each alone on the same inputs"
        _close(value, expected[name], f"{what}. {_ADVICE}")
    largest = max((g.abs().max().item() for g in together.gradients.values()), default=0.0)
    for place in together.gradients.keys() | alone[0].gradients.keys() | alone[1].gradients.keys():
        total = sum(run.gradients[place] for run in alone if place in run.gradients)
        what = (
            f"{names}: the gradient of the penalties at {place}, together and the sum of each alone"
        )
        _close(
            torch.as_tensor(together.gradients.get(place, 0.0)),
            torch.as_tensor(total),
            what,
            largest,
        )
    for reader, makes_without in ((apart[0], makes[1:]), (apart[1], makes[:1])):
        if reader.only_reads:
            without = Attached(makes_without, subject), Attached(makes, subject)
            outputs = [trial.step(backward=False)[2] for trial in without]
            _close(
                outputs[1],
                outputs[0],
                f"{names}: the output with {reader.name}, which only reads, and without",
            )


@dataclass
class _Run:
    """The penalties of one forward, and their gradients, layer by layer."""

    terms: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass
class _Tape:
    """What went into and came out of the modules of one forward, in the order of their calls."""

    calls: dict[str, list[Any]] = field(default_factory=dict)
    # id -> the tensor, and its copy on the tape
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: dict[str, int] | None = None  # how far a replay is; None while recording
    # the tensors as a run used them, cut from the graph
    leaves: dict[str, Tensor] = field(default_factory=dict)
    # id of a copy on the tape -> what the run used for it
    used: dict[int, Tensor] = field(default_factory=dict)

    def again(self) -> _Tape:
        """The same tape from its start."""
        return _Tape(self.calls, self.kept, places={})

    def _keep(self, value: Any) -> Any:
        """A copy of a tensor for later runs, one for all places that it goes to."""
        if not isinstance(value, Tensor):
            return value
        return self.kept.setdefault(id(value), (value, value.detach().clone()))[1]

    def swap(self, place: str, value: Any) -> Any:
        """What to continue with at a place: the value, kept for later runs, or what an earlier run
        kept there."""
        if self.places is None:
            kept = self.calls.setdefault(place, [])
            kept.append(pytree.tree_map(self._keep, value))
            number = len(kept) - 1
        else:
            number = self.places.get(place, 0)
            self.places[place] = number + 1
            require(
                number < len(self.calls.get(place, ())),
                f"{place} runs more often alone than together",
            )
        given, _ = pytree.tree_flatten(value)
        kept_leaves, form = pytree.tree_flatten(self.calls[place][number])
        new = []
        for i, (old, leaf) in enumerate(zip(given, kept_leaves, strict=True)):
            if isinstance(leaf, Tensor) and old.requires_grad:
                if id(leaf) not in self.used:
                    cut = self.leaves[f"{place}, call {number}, tensor {i}"] = (
                        leaf.clone().requires_grad_()
                    )
                    # adds nothing, but keeps the way of the residual branches
                    self.used[id(leaf)] = cut + old * 0
                leaf = self.used[id(leaf)]
            new.append(leaf)
        return pytree.tree_unflatten(new, form)


def _run(makes: Sequence[Make], subject: Subject, tape: _Tape) -> _Run:
    """One forward with some methods, and the gradients of their penalties within each layer."""
    trial = Attached(makes, subject)
    _move_weights(trial.model)
    hooks = []
    for name, module in trial.model.named_modules():
        if "dampen_regularizers" in name or not _is_leaf(module):
            continue
        into, out = functools.partial(_into, tape, name), functools.partial(_out, tape, name)
        hooks.append(module.register_forward_pre_hook(into, with_kwargs=True))
        hooks.append(module.register_forward_hook(out))
    torch.manual_seed(2)
    trial.model(**trial.inputs)
    for hook in hooks:
        hook.remove()
    terms = trial.reg.penalties()
    total = sum(terms.values(), start=torch.zeros(()))
    if total.requires_grad:
        total.backward()
    gradients = _model_gradients(trial)
    gradients |= {place: leaf.grad for place, leaf in tape.leaves.items() if leaf.grad is not None}
    return _Run({name: value.detach() for name, value in terms.items()}, gradients)


def _into(tape: _Tape, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tape.swap(f"the input of {name}", (args, kwargs))


def _out(tape: _Tape, name: str, module: nn.Module, args: Any, out: Any) -> Any:
    return tape.swap(f"the output of {name}", out)


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module has no children, or is torch's attention, which calls none of its
    projections."""
    return isinstance(module, nn.MultiheadAttention) or not list(module.children())


def _move_weights(model: nn.Module) -> None:
    """Change every weight a little, for methods that compare it with what it was when they were
    attached."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "dampen_regularizers" not in name:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)


def _model_gradients(trial: Attached) -> dict[str, Tensor]:
    """Of the model's own parameters; those of methods go by numbers that depend on who else is
    there."""
    return {name: g for name, g in trial.gradients().items() if "dampen_regularizers" not in name}


def _close(a: Tensor, b: Tensor, message: str, largest: float = 0.0) -> None:
    """Equal as far as float32 goes, measured at the largest number of b, or at that of all that are
    compared."""
    scale = max(b.abs().max().item() if b.numel() else 1.0, 1e-2 * largest, 1e-6)
    gap = (a - b).abs().max().item() if a.numel() else 0.0
    require(gap <= 2e-4 * scale, f"{message}: off by {gap:.3g} where the largest is {scale:.3g}")


def _skip_refused(check: Callable[..., None], make: Make, other: Make, subject: Subject) -> None:
    """A companion that the model cannot have, or that another refuses, is left out; the method
    itself is not."""
    Attached(make, subject)
    try:
        Attached([with_example(make), other], subject)
    except UnsupportedModel:
        return
    check(make, other, subject)


PAIR_CONTRACTS = {"order": order_of_two, "beside": penalties_of_two}
"""What is promised of any two methods, by name."""
