"""WeightDecay: decoupled weight decay as a method, over depth and training, plain or cautious."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from dampen._torch import scale_in_place
from dampen.hooks.discover.sites import find_layers
from dampen.regularizer import Regularizer, StepCall
from dampen.schedules import Value


class WeightDecay(Regularizer):
    """Pull the weights towards zero in every step of the optimizer, apart from the gradient:
    decoupled weight decay (arXiv 1711.05101), and cautious weight decay (arXiv 2510.12402).

    w <- w - eta lambda w, eta the learning rate of the weight's parameter group, before the step of
    AdamW as torch takes it. `cautious=True` decays an entry only where the optimizer's own update
    u moves it towards zero: w <- w - eta (u + lambda [u w >= 0] w).

    Give it the optimizer once: `reg.attach_optimizer(optimizer)`; the trainers' integrations and
    `dampen compare` on the built-in trainer do so. Any optimizer of torch works. Where it has a
    `weight_decay` of its own (AdamW: 0.01), this one replaces it: it is set to 0 in the groups of
    the model, with a warning. `rate` follows schedules over training and depth; embeddings count
    to the first layer, and the head to the last. A frozen or unused parameter does not decay.

    Args:
        rate: lambda; a number, a schedule or one value per layer.
        cautious: decay only what the update does not enlarge.
        norms_and_biases: decay parameters of one axis too.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.WeightDecay(dampen.linear(0.1, 0.0, "progress")))
    >>> reg.attach_optimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    """

    stochastic = False
    replaces_weight_decay = True
    rate: Tensor

    def __init__(
        self, rate: Value = 0.05, cautious: bool = False, norms_and_biases: bool = False
    ) -> None:
        super().__init__()
        self.scheduled("rate", rate, high=math.inf)
        self.cautious, self.norms_and_biases = cautious, norms_and_biases
        self._weights: _Weights | None = None
        self.places: list[tuple[nn.Module, str]] = []

    def inspect_model(self, model: nn.Module) -> None:
        self._weights = _Weights()
        self._weights.sort(model, [plan.name for plan in find_layers(model, whole_stacks=True)])

    def prepare(self, model: nn.Module) -> None:
        assert self.site is not None  # a clone has been placed
        assert self._weights is not None
        for name in self._weights.of(self.site.name, self.site.total):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            if getattr(module, leaf).ndim > 1 or self.norms_and_biases:
                self.places.append((module, leaf))

    def before_step(self, call: StepCall) -> Callable[[], None] | None:
        moving = call.moving(self.places)
        weights, rate = [p.detach() for p, _ in moving], self._numbers["rate"]
        if not weights:
            return None
        if not self.cautious:
            # w <- w - eta lambda w
            scale_in_place(weights, [1 - eta * rate for _, eta in moving])
            return None
        before = [w.clone() for w in weights]

        def decay() -> None:
            for w, old, (_, eta) in zip(weights, before, moving, strict=True):
                # [u w >= 0], where the step took w to w - eta u
                w.sub_(old * ((old - w) * old >= 0), alpha=eta * rate)

        return decay

    def extra_repr(self) -> str:
        return super().extra_repr() + (", cautious" if self.cautious else "")


class _Weights:
    """The names of a model's parameters by layer, found once and shared by the
    clones of all layers."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.before: list[str] = []
        self.after: list[str] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Weights:
        return self

    def sort(self, model: nn.Module, layers: list[str]) -> None:
        self.layers, self.inside = layers, {name: [] for name in layers}
        outside = self.before
        for name, _ in model.named_parameters():
            parts = name.split(".")
            prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
            layer = next((p for p in prefixes if p in self.inside), None)
            if layer is None:
                outside.append(name)
            else:
                self.inside[layer].append(name)
                outside = self.after

    def of(self, layer: str, total: int) -> list[str]:
        """Those of a layer. Where all layers are regularized, what comes before them is of the
        first and what comes after of the last."""
        found = list(self.inside.get(layer, ()))
        if total == len(self.layers):
            found += self.before * (layer == self.layers[0])
            found += self.after * (layer == self.layers[-1])
        return found
