"""`regularize`, and the handle that it returns: progress goes in, penalties come out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.attach import attach, check_model
from dampen.kernels import use_tuned_table
from dampen.prefix import Prefix
from dampen.regularizer import Regularizer
from dampen.report import describe
from dampen.state import Layer, ModelSite
from dampen.swap import is_covered, is_swapped, unswap


def regularize(
    model: nn.Module,
    methods: Regularizer | Iterable[Regularizer],
    sites: str | Sequence[str] = "*",
    *,
    attention: str = "all",
    projections: Mapping[str, str] | None = None,
) -> Regularization:
    """Put regularizers into `model`, in place, one clone per layer. Parameters, state_dict keys and eval mode stay as
    they were.

    Args:
        model: any model whose attention calls `F.scaled_dot_product_attention`, or `nn.MultiheadAttention`.
        methods: one regularizer or several; each is cloned, the given objects are left alone.
        sites: pattern(s) of dotted names of layers or attention modules, as in `"blocks.[0-3].*"`.
        attention: "self", "cross" or "all".
        projections: which linear map makes what, where names do not tell: role -> name inside the attention module.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = regularize(model, dampen.DropKey(dampen.linear(0.3, 0.0)))
    >>> loss, terms = reg.loss(lambda: model(torch.randn(4, 3, 8, 8)), lambda out: out.square().mean())
    >>> reg.remove()
    """
    if methods is None or isinstance(methods, str):
        raise TypeError(f"regularize takes regularizers such as DropKey(0.1), or a list of them, got {methods!r}.")
    chosen = [methods] if isinstance(methods, Regularizer) else list(methods)
    check_model(model)
    use_tuned_table()
    layers, clones, prefix = attach(model, chosen, sites, attention, projections)
    return Regularization(model, chosen, layers, clones, prefix)


class Regularization:
    """What `regularize` returns. Print it to see what sits where, at which rate, and which kernel runs."""

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[Regularizer],
        layers: Sequence[Layer],
        clones: Sequence[Regularizer],
        prefix: Prefix,
    ) -> None:
        self.model, self.methods = model, list(methods)
        self.layers, self.clones = list(layers), list(clones)
        self.prefix = prefix
        self._progress = 0.0
        self.progress(0.0)

    @property
    def passes(self) -> int:
        """Forward passes per training step."""
        return max((r.passes for r in self.clones), default=1)

    def progress(self, t: float) -> None:
        """Tell the schedules how far training is, in [0, 1]. Call it between steps."""
        self._alive()
        if isinstance(t, bool) or not isinstance(t, int | float):
            raise TypeError(f"progress takes a number in [0, 1], got {t!r}.")
        if not 0 <= t <= 1:  # NaN too
            raise ValueError(f"progress is the fraction of training done, in [0, 1], got {t}. Give step / steps.")
        self._progress = float(t)
        for r in self.clones:
            r.at(self._progress)

    def loss(
        self,
        forward: Callable[[], Any],
        criterion: Callable[[Any], Tensor],
        *,
        logits: Callable[[Any], Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward (twice where a method needs two passes), add the penalties: the loss and its named terms.

        Args:
            forward: runs the model and returns its output.
            criterion: the task loss of one such output.
            logits: takes the logits out of an output that is neither a tensor nor an object with `.logits`.
            valid: bool, False on padded positions, for methods that compare the outputs of two passes.
        """
        self._alive()
        for name, function in (("forward", forward), ("criterion", criterion)):
            if not callable(function):
                raise TypeError(
                    f"reg.loss({name}=...) is a function, got {type(function).__name__}: write "
                    "reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y))."
                )
        outputs: list[Any] = []
        terms: dict[str, Tensor] = {}
        comparing = [r for r in self.clones if "outputs" in r.stages and self._acts(r)]
        passes = max((r.passes for r in comparing), default=1)
        with self.prefix.step():
            for i in range(passes):
                self.prefix.begin(i, passes)
                outputs.append(forward())
                for name, value in self._taken().items():
                    terms[name] = terms.get(name, 0.0) + value / passes
        if comparing:
            taken = [_logits(o, logits) for o in outputs]
            for r in comparing:
                r.outputs(taken, valid)
            terms |= self._taken()
        task = sum((criterion(o) for o in outputs[1:]), start=criterion(outputs[0])) / len(outputs)
        return sum(terms.values(), start=task), {"task": task, **terms}

    def penalty(self) -> Tensor:
        """The sum of the penalties of the forward just done, for those who own their loop: `loss = task +
        reg.penalty()`."""
        taken = self.penalties()
        device = next((p.device for p in self.model.parameters()), None)
        return sum(taken.values(), start=torch.zeros((), device=device))

    def penalties(self) -> dict[str, Tensor]:
        """Take the penalties of the forward just done, by method and term, summed over layers."""
        self._alive()
        comparing = next((r for r in self.clones if r.passes > 1 and self._acts(r)), None)
        if comparing is not None:
            raise RuntimeError(
                f"{type(comparing).__name__} compares {comparing.passes} passes, and one forward has no penalty of it. "
                "Let the handle run them: loss, terms = reg.loss(lambda: model(x), criterion)."
            )
        return self._taken()

    def _taken(self) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        for r in self.clones:
            for name, value in r.take_penalties().items():
                if torch.is_grad_enabled() and not value.requires_grad and r.wants_gradient:
                    raise RuntimeError(
                        f"the penalty {name} at '{r.site.name if r.site else ''}' carries no gradient although its "
                        "layer is being "
                        "trained. Reentrant activation checkpointing discards it: use checkpoint(..., "
                        "use_reentrant=False), in "
                        "transformers gradient_checkpointing_kwargs={'use_reentrant': False}. (A forward under "
                        "torch.no_grad() has penalties without gradient too: read them under no_grad.)"
                    )
                terms[name] = terms[name] + value if name in terms else value
        return terms

    def parameters(self) -> list[nn.Parameter]:
        """The learnable values of the regularizers (none unless a method was asked to learn): give them to the
        optimizer.

        They are parameters of the model too, so `model.parameters()` already holds them."""
        return [p for r in self.clones for p in r.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """The position of the schedules and the learnable values. The model's own state_dict has nothing of them."""
        learnt = {
            f"{i}.{name}": p.detach().clone() for i, r in enumerate(self.clones) for name, p in r.named_parameters()
        }
        return {"progress": self._progress, "parameters": learnt, "methods": [r.name for r in self.methods]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        missing = {"progress", "parameters", "methods"} - set(state)
        if missing:
            raise ValueError(
                f"not a state of a Regularization: {', '.join(sorted(missing))} missing, got {sorted(state)}."
            )
        if list(state["methods"]) != [r.name for r in self.methods]:
            raise ValueError(
                f"the state is of the methods {list(state['methods'])}, but this model carries "
                f"{[r.name for r in self.methods]}. Regularize with the same methods before loading."
            )
        own = {f"{i}.{name}": p for i, r in enumerate(self.clones) for name, p in r.named_parameters()}
        if set(own) != set(state["parameters"]):
            raise ValueError(f"learnable values differ: expected {sorted(own)}, got {sorted(state['parameters'])}.")
        with torch.no_grad():
            for name, value in state["parameters"].items():
                own[name].copy_(value)
        self.progress(state["progress"])

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, the model trains as if it had no regularizers."""
        before, model = [layer.enabled for layer in self.layers], self._model_site.enabled
        self._set("enabled", False)
        try:
            yield
        finally:
            for layer, value in zip(self.layers, before, strict=True):
                layer.enabled = value
            self._model_site.enabled = model

    @contextlib.contextmanager
    def mc_mode(self) -> Iterator[None]:
        """Inside, the stochastic regularizers act in eval mode too: Monte-Carlo sampling at test time."""
        self._set("sampling", True)
        try:
            yield
        finally:
            self._set("sampling", False)

    @torch.no_grad()
    def mc_average(
        self, forward: Callable[[], Any], samples: int = 16, logits: Callable[[Any], Tensor] | None = None
    ) -> Tensor:
        """Class probabilities averaged over `samples` random forwards: DropKey's remedy for the gap between training
        and test."""
        if samples < 1:
            raise ValueError(f"mc_average needs at least one sample, got {samples}.")
        with self.mc_mode():
            total = _logits(forward(), logits).softmax(-1)
            for _ in range(samples - 1):
                total = total + _logits(forward(), logits).softmax(-1)
        return total / samples

    def kernels(self) -> dict[str, str]:
        """For each attention, the kernel that ran in its last forward, and why."""
        return {name: kernel for layer in self.layers for name, kernel in layer.kernels.items()}

    def remove(self) -> None:
        """Give the model back exactly as it was."""
        self._alive()
        swapped = {n: m for n, m in self.model.named_modules() if is_swapped(m)}
        covered = [n or "(the model itself)" for n, m in swapped.items() if is_covered(m)]
        if covered:
            raise RuntimeError(
                f"remove() after fully_shard (FSDP2) would strip FSDP's class from {covered[0]}"
                f"{f' and {len(covered) - 1} more' if len(covered) > 1 else ''}. Nothing was changed. Remove before "
                "sharding, or save "
                "the state_dict, whose keys are the plain model's, and load it into a plain model."
            )
        for module in list(self.model.modules()):
            unswap(module)
            module._modules.pop("dampen_regularizers", None)
        self.layers, self.clones = [], []
        self._removed = True

    _removed = False

    def _alive(self) -> None:
        if self._removed:
            raise RuntimeError("this regularization was removed from its model. Call dampen.regularize again.")

    def _acts(self, r: Regularizer) -> bool:
        return self._model_site.enabled and (self.model.training or r.in_eval)

    @property
    def _model_site(self) -> ModelSite:
        return self.model._dampen_model  # type: ignore[return-value]

    def _set(self, name: str, value: bool) -> None:
        self._alive()
        for layer in self.layers:
            setattr(layer, name, value)
        setattr(self._model_site, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Regularization:
        """A copy of the model and of its regularizers, independent of this one."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            setattr(new, key, copy.deepcopy(value, memo))
        return new

    def __repr__(self) -> str:
        return describe(self)


def _logits(output: Any, take: Callable[[Any], Tensor] | None) -> Tensor:
    """The logits of a model output: a tensor, `.logits` of a Hugging Face output, or what the user says."""
    value = output if take is None else take(output)
    if isinstance(value, Tensor):
        return value
    if isinstance(getattr(value, "logits", None), Tensor):
        return value.logits
    raise TypeError(
        f"the model's output is a {type(value).__name__}, neither a tensor nor an object with .logits. "
        "Say where the logits are: reg.loss(forward, criterion, logits=lambda out: out['scores']), or out[0]."
    )
