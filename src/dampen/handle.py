"""`regularize`, and the handle that it returns: progress goes in, penalties come out."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from dampen.calls import Penalties, Penalty, consume, makes_penalties, settle, total
from dampen.deprecated import HANDLE, OldNames, accepts_old_arguments
from dampen.hooks.builtin_dropout import OwnRate, choose_own, depth_of, own_rates, sampling_own
from dampen.hooks.context import Layer, ModelSite
from dampen.hooks.describe import describe
from dampen.hooks.model import CarrierSite, run_example
from dampen.hooks.patch import attach, check_model, remove, swap
from dampen.hooks.weights import AttachedOptimizer, Start, carrying, check_attached, unwrap
from dampen.native.library import use_native_kernels
from dampen.regularizer import LOSS_STAGES, Regularizer
from dampen.schedules import Value, as_schedule, check_progress, per_layer
from dampen.two_pass.reuse import SharedBlocks


@accepts_old_arguments
def regularize(
    model: nn.Module,
    methods: Regularizer | str | Iterable[Regularizer | str],
    target_modules: str | Sequence[str] = "*",
    *,
    attention: str = "all",
    projections: Mapping[str, str] | None = None,
    depth: str = "stack",
    strict: bool = True,
    example: Any = None,
    attach_to_loss: bool | float = False,
    keep_start: bool = False,
    replace_attention: bool = False,
) -> Handle:
    """Put regularizers into `model`, in place, one clone per layer. Parameters, state_dict keys and
    eval mode stay as they were. Learned rates (`learn=`) alone are parameters that the model gains:
    they are in `model.parameters()`, so that optimizers and DDP see them, and not in its
    state_dict; `reg.state_dict()` has them.

    Args:
        model: any model with softmax attention: by `F.scaled_dot_product_attention`, by
            `nn.MultiheadAttention`, or computed by its own code; what cannot be recognized raises.
        methods: one regularizer or several, or text as in `dampen compare`: "drop_key(rate=0.2) +
            drop_head". Each is cloned, the given objects are left alone.
        target_modules: pattern(s) of dotted names of layers or attention modules, as in
            `"blocks.[0-3].*"`; one that begins with "!" leaves out what fits
            it, as in `"!blocks.0"`.
        attention: "self", "cross" or "all".
        projections: which linear layer has which role, where names do not show it: role -> name
            inside the attention module.
        depth: "stack": an encoder and a decoder (or two towers) each have their own depth from 0 to
            1 for schedules; "model": all layers count as one stack. Layers count in the order in
            which they run, which the first forward shows (until then: in which the model lists
            them) or `example`.
        strict: raise where penalties were left out of the loss (a backward ran while they waited),
            or a two-pass method was (the model was trained outside `reg.loss`).
            False for those who mean it.
        example: what the model is called with (a tensor, a tuple of arguments, a dict of keywords).
            One forward then reports at once what the first training step would: an attention that
            cannot be entered, for one.
        attach_to_loss: for trainers whose loss cannot be touched: adds the penalty gradients
            through the loss that the model itself returns, whose value stays what it was
            (`reg.attached` has the penalties). A number instead of True where it returns none: how
            much of that gradient each backward adds.
        keep_start: keep the weights of now, for `reg.interpolate` and `reg.at_start`.
        replace_attention: attention that the model computes itself, softmax(c q k^T + mask) v, runs
            as dampen's, in training with a method in it. Faster, and equal up to rounding: the
            first forward of each shape compares both. Anything else stays as it is.

    Returns:
        the handle: the loss, the penalties, the schedules, and `remove()`.

    Raises:
        ValueError: a method or a pattern that fits no layer, or unknown names in a text.
        UnsupportedModel: a layer that a method cannot act on; the error says how to leave it out.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = regularize(model, dampen.DropKey(dampen.linear(0.3, 0.0)))
    >>> loss, terms = reg.loss(lambda: model(torch.randn(4, 3, 8, 8)), lambda out: out.square().mean())
    >>> reg.remove()
    """
    chosen = _chosen(methods)
    check_model(model)
    use_native_kernels()
    layers, clones, prefix = attach(model, chosen, target_modules, attention, projections, depth)
    reg = Handle(model, chosen, layers, clones, prefix, strict)
    if keep_start and reg.start is None:
        reg.start = Start(model)
    for module in model.modules() if replace_attention else ():
        site = module.__dict__.get("_dampen_attention")
        if site is not None:
            site.replaced = {}
    if attach_to_loss is not False:
        try:
            _attach_to_loss(reg, attach_to_loss)
        except BaseException:
            reg.remove()
            raise
    if example is not None:
        try:
            run_example(model, example)
            reg._settle_order()
        except BaseException:
            reg.remove()
            raise
    return reg


def _chosen(methods: Any) -> list[Any]:
    """The regularizers of an argument `methods`: texts are read, objects stay. `attach`
    checks what they are."""
    if methods is None:
        raise TypeError(
            "regularize takes regularizers such as DropKey(0.1), a list of them, or text, got None."
        )
    given = [methods] if isinstance(methods, Regularizer | str | type) else list(methods)
    # the names of methods are known above this module, so the reader of texts is found when needed
    read = importlib.import_module("dampen.texts").read_methods
    chosen = [m for g in given for m in (read(g) if isinstance(g, str) else [g])]
    names = [type(m).__name__ for m in chosen]
    for twice in sorted({name for name in names if names.count(name) > 1}):
        warnings.warn(
            f"regularize got {twice} {names.count(twice)} times; each "
            "acts, one after the other. Leave one out if "
            "that is not meant.",
            stacklevel=4,
        )
    return chosen


def _attach_to_loss(reg: Handle, scale: bool | float) -> None:
    """Let the model's own output carry the penalties."""
    comparing = next((m for m in reg.methods if _needs_loss(m)), None)
    if comparing is not None:
        reads = "compares two passes" if comparing.passes > 1 else "reads the output or the loss"
        raise ValueError(
            f"regularize(..., attach_to_loss={scale!r}): {type(comparing).__name__} {reads}, and "
            "one forward cannot carry that. Use an integration "
            "(dampen.integrations) or reg.loss for it, and "
            "attach penalties only."
        )
    if scale is not True and not (isinstance(scale, int | float) and scale > 0):
        raise ValueError(
            "attach_to_loss is True, or the positive number "
            f"to scale the penalties by, got {scale!r}."
        )
    swap(reg.model, "carrier", CarrierSite(reg, None if scale is True else float(scale)))


class Handle(OldNames):
    """What `regularize` returns. Print it to see what sits where, at which rate,
    and which kernel runs."""

    _old_names = HANDLE
    _penalties_seen = False

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[Regularizer],
        layers: Sequence[Layer],
        clones: Sequence[Regularizer],
        prefix: SharedBlocks,
        strict: bool = True,
    ) -> None:
        self.model, self.methods = model, list(methods)
        self.layers, self.clones, self.prefix = list(layers), list(clones), prefix
        self._model_site.ledger = Penalties(model, clones, strict)
        for clone in clones:
            if clone.passes > 1 or makes_penalties(clone):
                self._ledger.watch(clone)  # now, because a compiled forward cannot
        self.attached: dict[
            str, Tensor
        ] = {}  # with `attach_to_loss`, the penalties of the last training forward
        self.start = Start(model) if any(m.reads_start for m in methods) else None
        self.anchoring = False  # whether the model runs as its own start
        self._progress = 0.0
        self.progress(0.0)

    @property
    def in_loss(self) -> bool:
        """Whether `reg.loss` is under way."""
        return self._ledger.asked()

    @property
    def reads_outputs(self) -> bool:
        """Whether a method looks at the model's logits in `reg.loss`."""
        return any("outputs" in r.stages for r in self.clones)

    @property
    def passes(self) -> int:
        """Forward passes per training step."""
        return max((r.passes for r in self.clones), default=1)

    def progress(self, t: float) -> None:
        """Set the progress of training, in [0, 1], for the schedules. Call it between steps.

        Args:
            t: the share of the training that is done.

        Raises:
            ValueError: t is not a number in [0, 1].
        """
        self._alive()
        self._progress = check_progress(t)
        self._settle_order()
        for r in self.clones:
            r.at(self._progress)
        for rate in self._model_site.own_rates:
            rate.at(self._progress)

    def attach_optimizer(self, optimizer: Any) -> None:
        """Let the methods that act on the weights (WeightDecay, WeightAverage) follow the steps of
        an optimizer. Any other method ignores it, so a training loop may always call it.

        Args:
            optimizer: of the model's parameters; call again for a second one.
        """
        self._alive()
        found = unwrap(optimizer)
        site = self._model_site
        if site.stepping and all(known.optimizer is not found for known in site.attached):
            site.attached.append(AttachedOptimizer(self.model, site.stepping, found))

    def loss(
        self,
        forward: Callable[[], Any],
        criterion: Callable[[Any], Tensor],
        *,
        logits: Callable[[Any], Tensor] | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward (twice where a method needs two passes), add the penalties: the loss and
        its named terms.

        Args:
            forward: runs the model and returns its output.
            criterion: the task loss of one such output.
            logits: takes the logits out of an output that is neither a tensor nor
                an object with `.logits`.
            valid: bool, False on padded positions, for methods that compare
                the outputs of two passes.

        Returns:
            the loss to call `backward()` on, and its terms by name, `task` among them.
        """
        self._alive()
        for name, function in (("forward", forward), ("criterion", criterion)):
            if not callable(function):
                raise TypeError(
                    f"reg.loss({name}=...) is a function, got {type(function).__name__}: write "
                    "reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y))."
                )
        outputs: list[Any] = []
        if self.model.training and torch.is_grad_enabled():
            self._ledger.check()
            check_attached(self.model, self._model_site)
        terms = (
            self._taken()
        )  # what waits from forwards before this one counts once, however many passes follow
        comparing = [r for r in self.clones if "outputs" in r.stages and self._acts(r)]
        several = [r for r in self.clones if r.passes > 1 and self._acts(r)]
        passes = max((r.passes for r in several), default=1)
        anchored = [r for r in comparing if r.reads_start]
        reference = None
        if anchored:
            with torch.no_grad(), self.at_start():
                reference = _logits(forward(), logits).detach()
        with self._ledger.asking():
            if passes == 1:
                outputs.append(forward())
                for name, value in self._taken().items():
                    terms[name] = terms[name] + value if name in terms else value
            else:
                with self.prefix.step(passes, self.model):
                    for i in range(passes):
                        self.prefix.begin(i, passes)
                        for r in several:
                            r.turn = i
                        outputs.append(forward())
                        for name, value in self._taken().items():
                            terms[name] = terms.get(name, 0.0) + value / passes
        if comparing:
            taken = [_logits(o, logits) for o in outputs]
            with self._ledger.asking():
                for r in comparing:
                    r.reference = reference if r.reads_start else None
                    r.outputs(taken[: r.passes] if r.passes > 1 else taken, valid)
            terms |= self._taken()
        tasks = [
            criterion(o) for o in outputs
        ]  # in a tiny model each operation counts, a division by one too
        task = sum(tasks[1:], start=tasks[0]) / len(tasks) if len(tasks) > 1 else tasks[0]
        weighted = [w for r in several if (w := r.pass_weights()) is not None]
        if weighted:
            task = torch.stack([w * t for w, t in zip(weighted[0], tasks, strict=True)]).sum()
        flooding = [r for r in self.clones if "task" in r.stages and self._acts(r)]
        if flooding:
            with self._ledger.asking():
                for r in flooding:
                    r.task(task)
            terms |= self._taken()
        return sum(terms.values(), start=task), {"task": task, **terms}

    def penalty(self) -> Tensor:
        """The sum of the penalties made since they were last taken, for those who own their loop:
        `loss = task + reg.penalty()`.

        Returns:
            a scalar; 0 where no method has a penalty.
        """
        taken = self.penalties()
        device = next((p.device for p in self.model.parameters()), None)
        return sum(taken.values(), start=torch.zeros((), dtype=torch.float32, device=device))

    def penalties(self) -> dict[str, Tensor]:
        """Take the penalties made since they were last taken, by method and term, summed over
        layers and forwards: both of a siamese step count. Forwards in eval and
        under `no_grad` add none.

        Returns:
            the terms by name, as in `explicit_dropout.value`.
        """
        self._alive()
        comparing = next((r for r in self.clones if _needs_loss(r) and self._acts(r)), None)
        if comparing is not None:
            reads = "the output and the task loss"
            if comparing.passes > 1:
                reads = f"{comparing.passes} passes"
            raise RuntimeError(
                f"{type(comparing).__name__} compares "
                f"{reads}, and one forward has no penalty of it. "
                "Let the handle run them: loss, terms = reg.loss(lambda: model(x), criterion)."
            )
        if self.model.training and torch.is_grad_enabled():
            check_attached(self.model, self._model_site)
        return self._taken()

    def _taken(self) -> dict[str, Tensor]:
        ledger = self._ledger
        found: dict[str, list[Penalty]] = {}
        for r in self.clones:
            if not r._penalties and not r.lost:
                continue
            lost, r.lost = r.lost, False
            bare = r.name if lost else None  # a term without gradient
            for name, value in consume(r).items():  # layers may lie on several devices
                found.setdefault(name, []).append(value)
                if (
                    isinstance(value, Tensor) and not value.requires_grad
                ):  # what is deferred has one
                    bare = name
            if bare is not None and torch.is_grad_enabled():
                self._check_gradient(r, bare)
        terms = {name: total(values) for name, values in found.items()}
        ledger.taken()
        if terms and not self._penalties_seen:
            self._penalties_seen = True
            self._check_adapters()
        return settle(terms)

    def _check_adapters(self) -> None:
        """Raise where LoRA was put around a map after `regularize`: a penalty reads the frozen map
        below it alone."""
        for name, module in self.model.named_modules():
            site = vars(module).get("_dampen_linear")
            if site is None or site.adapter is not None or not name.endswith(".base_layer"):
                continue
            reading = [c for c in site.layer.clones if site.role in c.roles and makes_penalties(c)]
            if reading:
                self._ledger.forget()
                raise RuntimeError(
                    "an adapter (LoRA) was put around "
                    f"'{name.removesuffix('.base_layer')}' after regularize, so "
                    f"{type(reading[0]).__name__} reads the frozen map below "
                    "it, not the one that is trained. Put the "
                    "adapters in first, then regularize; or say "
                    "it: dampen.integrations.peft.connect(reg)."
                )

    def _check_gradient(self, r: Regularizer, name: str) -> None:
        if r.wants_gradient:
            self._check_adapters()
            self._ledger.forget()
            raise RuntimeError(
                f"the penalty {name} at '{r.site.name if r.site else ''}' "
                "carries no gradient although its layer is "
                "being trained. Reentrant activation "
                "checkpointing discards it: use checkpoint(..., "
                "use_reentrant=False), in transformers "
                "gradient_checkpointing_kwargs={'use_reentrant': False}. "
                "(A part of the model that runs under torch.no_grad() has "
                "penalties without gradient too: leave its "
                "layers out with target_modules=, or freeze them.)"
            )

    def parameters(self) -> list[nn.Parameter]:
        """The learnable values of the regularizers (none unless a method learns): give them to the
        optimizer.

        They are parameters of the model too, so `model.parameters()` already holds them.

        Returns:
            the learnable parameters.
        """
        return [p for r in self.clones for p in r.parameters() if p.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """The position of the schedules, the learned values, and the weights that Mixout started
        from. The model's own state_dict has nothing of them. Where weights are sharded,
        call it in every process.

        Returns:
            tensors and numbers, to save beside the model's state_dict.
        """
        learnt = {
            f"{i}.{name}": p.detach().clone()
            for i, r in enumerate(self.clones)
            for name, p in r.saved().items()
        }
        state = {
            "progress": self._progress,
            "parameters": learnt,
            "methods": [r.name for r in self.methods],
        }
        if self.start is not None:
            state["start"] = self.start.state_dict()
        return state | ({} if self.passes == 1 else {"never_doubled": self.prefix.doubled.why})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Args:
            state: from `state_dict`, of a model with the same methods.
        """
        missing = {"progress", "parameters", "methods"} - set(state)
        if missing:
            raise ValueError(
                "not a state of a Handle: "
                f"{', '.join(sorted(missing))} missing, got {sorted(state)}."
            )
        if list(state["methods"]) != [r.name for r in self.methods]:
            raise ValueError(
                f"the state is of the methods {list(state['methods'])}, but this model carries "
                f"{[r.name for r in self.methods]}. "
                "Regularize with the same methods before loading."
            )
        own = {f"{i}.{name}": (r, name) for i, r in enumerate(self.clones) for name in r.saved()}
        if set(own) != set(state["parameters"]):
            raise ValueError(
                "learnable values differ: expected "
                f"{sorted(own)}, got {sorted(state['parameters'])}."
            )
        for key, value in state["parameters"].items():
            r, name = own[key]
            r.restore(name, value)
        if self.start is not None and "start" in state:
            self.start.load_state_dict(state["start"])
        self.prefix.doubled.go_on(state)
        self._model_site.writes.clear()  # the weights may have been loaded too
        self.progress(state["progress"])

    @contextlib.contextmanager
    def at_start(self) -> Iterator[None]:
        """Inside, the model is what it was at `regularize`, in eval mode and without regularizers:
        with the weights of then, or with its LoRA adapters off."""
        start = self._kept_start("reg.at_start()")
        self.anchoring = True
        try:
            with self.disable(), start.entered(self.model):
                yield
        finally:
            self.anchoring = False

    @contextlib.contextmanager
    def interpolate(self, alpha: float) -> Iterator[None]:
        """Inside, the weights are (1 - alpha) start + alpha now, for a fine-tuned model that should
        stay robust: WiSE-FT (arXiv 2109.01903). Of LoRA adapters, alpha is their share.

        Args:
            alpha: 0 is the model at `regularize`, 1 the model as it is.
        """
        start = self._kept_start("reg.interpolate(alpha)")
        if not 0 <= alpha <= 1:
            raise ValueError(f"reg.interpolate takes alpha in [0, 1], got {alpha!r}.")
        with start.interpolated(self.model, alpha):
            yield

    def _kept_start(self, what: str) -> Start:
        self._alive()
        if self.start is None:
            raise RuntimeError(
                f"{what} needs the starting weights, which were not kept. Load the pre-trained "
                "weights, then call dampen.regularize(..., keep_start=True), or use AnchorKL."
            )
        return self.start

    @contextlib.contextmanager
    def averaged(self, loader: Iterable[Any] | None = None) -> Iterator[None]:
        """Inside, the model carries the average of WeightAverage; afterwards its own weights again.

        Args:
            loader: training batches, to compute the statistics of batch norm anew at the average
                (`torch.optim.swa_utils.update_bn`); without it they are averaged like the weights.
        """
        self._alive()
        found = [weights for c in self.clones if (weights := c.averaged_weights()) is not None]
        if len(found) != 1:
            raise ValueError(
                f"reg.averaged() is for one WeightAverage, and this model has {len(found)}. "
                "Add it: dampen.regularize(model, [..., dampen.WeightAverage('ema')])."
            )
        if not found[0] and not self._model_site.attached:
            raise RuntimeError(
                "reg.averaged() has no average: no step was counted, because the handle has no "
                "optimizer. Call reg.attach_optimizer(optimizer) once, before training."
            )
        with carrying(self.model, found[0]):
            if loader is not None:
                with self.disable():
                    update_bn(loader, self.model, next(self.model.parameters()).device)
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, the model trains as if it had no regularizers. Its own dropout stays;
        `dampen.deterministic` silences that too."""
        self._alive()
        with self._model_site.holding("enabled", False):
            yield

    @contextlib.contextmanager
    def mc_mode(self) -> Iterator[None]:
        """Inside, the stochastic regularizers and the model's own dropout act in eval mode too:
        Monte-Carlo sampling at test time."""
        self._alive()
        with self._model_site.holding("sampling", True), sampling_own(self.model):
            yield

    @torch.no_grad()
    def mc_average(
        self,
        forward: Callable[[], Any],
        samples: int = 16,
        logits: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """Class probabilities averaged over `samples` random forwards: DropKey's remedy for the gap
        between training and test.

        Args:
            forward: runs the model and returns its output.
            samples: the number of forward passes.
            logits: takes the logits out of an output that is neither a tensor nor
                an object with `.logits`.

        Returns:
            probabilities, in the shape of the logits.
        """
        if samples < 1:
            raise ValueError(f"mc_average needs at least one sample, got {samples}.")
        with self.mc_mode():
            total = _logits(forward(), logits).softmax(-1)
            for _ in range(samples - 1):
                total = total + _logits(forward(), logits).softmax(-1)
        return total / samples

    def builtin_dropout(self, target_modules: str | Sequence[str] = "*") -> list[OwnRate]:
        """The dropout that is part of the model: its places and its rates now.

        Args:
            target_modules: pattern(s) of names ("blocks.*.attn_drop") or kinds ("drop path",
                "attention dropout").

        Returns:
            one entry per place, with its name, kind and rate.
        """
        self._alive()
        rates = own_rates(self.model, self._model_site.own_rates)
        return rates if target_modules == "*" else choose_own(rates, target_modules)

    @accepts_old_arguments
    def set_builtin_dropout(
        self, rate: Value, target_modules: str | Sequence[str] = "*"
    ) -> list[OwnRate]:
        """Give the dropout that is part of the model other rates from now on, and
        return those that were set.

        `remove()` gives back what was. A rate is a plain number of the model, so a compiled graph
        is compiled again whenever it changes: schedule regularizers instead where that matters.

        Args:
            rate: a number (0 switches it off), a schedule or one value per layer.
            target_modules: pattern(s) of names ("blocks.*.attn_drop") or kinds ("drop path",
                "attention dropout").

        Returns:
            the places that were set.

        Raises:
            ValueError: no place fits `target_modules`.

        >>> import dampen
        >>> model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1)
        >>> reg = regularize(model, dampen.DropKey(0.1))
        >>> reg.set_builtin_dropout(0.3, "attention dropout")
        [self_attn.dropout: attention dropout 0.3]
        """
        self._alive()
        rates = own_rates(self.model, self._model_site.own_rates)
        chosen = choose_own(rates, target_modules)
        schedule = as_schedule(rate, "reg.set_builtin_dropout(rate=...)")
        if isinstance(schedule, per_layer) and len(schedule.values) != len(self.layers):
            raise ValueError(
                "reg.set_builtin_dropout(rate=...) has "
                f"{len(schedule.values)} values, but the model has "
                f"{len(self.layers)} layers. Give one value per layer, "
                "one number for all, or a schedule such as "
                "linear(0.3, 0.0)."
            )
        for r in chosen:
            r.schedule, r.depth = schedule, depth_of(r.place, self.model, self.layers)
            r.at(self._progress)
        self._model_site.own_rates = [r for r in rates if r.schedule is not None]
        return chosen

    def kernels(self) -> dict[str, str]:
        """For each attention, the kernel that ran in its last forward, and why.

        Returns:
            name of the attention -> kernel and reason.
        """
        return {
            name: kernel
            for layer in self.layers
            for name, kernel in layer.kernels.items()
            if kernel
        }

    def remove(self) -> None:
        """Give the model back exactly as it was."""
        self._alive()
        remove(self.model)
        self.layers, self.clones = [], []

    def _alive(self) -> None:
        if "_dampen_model" not in vars(self.model):
            raise RuntimeError(
                "this regularization was removed from its model. Call dampen.regularize again."
            )

    def _settle_order(self) -> None:
        """Put the layers in the order in which the last forward ran them."""
        order = self._model_site.order
        if order is not None:
            order.settle()
            self.layers = list(order.layers)

    def _acts(self, r: Regularizer) -> bool:
        return self._model_site.enabled and (self.model.training or r.in_eval)

    @property
    def _ledger(self) -> Penalties:
        return self._model_site.ledger

    @property
    def _model_site(self) -> ModelSite:
        return self.model._dampen_model  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """A copy of the model and of its regularizers, independent of this one."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            setattr(new, key, copy.deepcopy(value, memo))
        return new

    def __repr__(self) -> str:
        return describe(self)


def _needs_loss(method: Regularizer) -> bool:
    """Whether a method acts in `reg.loss` alone."""
    return method.passes > 1 or bool(method.stages & set(LOSS_STAGES))


def _logits(output: Any, take: Callable[[Any], Tensor] | None) -> Tensor:
    """The logits of a model output: a tensor, `.logits` of a Hugging Face output,
    or what the user says."""
    value = output if take is None else take(output)
    if isinstance(value, Tensor):
        return value
    if isinstance(logits := getattr(value, "logits", None), Tensor):
        return logits
    raise TypeError(
        f"the model's output is a {type(value).__name__}, "
        "neither a tensor nor an object with .logits. "
        "Say where the logits are: reg.loss(forward, criterion, "
        "logits=lambda out: out['scores']), or out[0]."
    )
