"""Lightning: a callback for `Trainer`, and the order of things for `Fabric`.

    trainer = lightning.Trainer(callbacks=[dampen.integrations.lightning.Regularize(reg)])

`training_step` is run unchanged, twice where a method compares two passes; the penalties are
added to the loss that it returns, before Lightning divides it by `accumulate_grad_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from dampen.handle import Handle
from dampen.integrations.watching import predictions, watching


class Regularize(Callback):
    """Train a LightningModule with `reg`, which regularized it or a part of it.

    Schedules follow `global_step / estimated_stepping_batches`, the terms are logged as
    `dampen/NAME`, and checkpoints hold the handle's state.

    Args:
        reg: what `dampen.regularize` returned, before the trainer wraps the model.
        valid: takes the batch and gives the positions that count when two passes are compared; all
            by default.
        logits: takes an output of the regularized model and gives the logits by which two passes
            are compared, as in `lambda out: out["scores"]`; needed where the output is neither a
            tensor nor has `.logits`.
    """

    def __init__(
        self,
        reg: Handle,
        valid: Callable[[Any], Tensor] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.reg, self.valid, self.logits = reg, valid, logits

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the penalties behind `training_step`, once.

        Args:
            trainer: a Trainer of transformers, TRL or sentence-transformers.
            pl_module: the LightningModule.
            stage: as Lightning passes it.
        """
        check(pl_module, self.reg)
        if stage != "fit":
            return
        # a fit that raised was not torn down: what it put on the module is not wrapped again
        inner = getattr(pl_module.training_step, "inner", pl_module.training_step)

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return self._step(pl_module, inner, batch, *args, **kwargs)

        training_step.inner = inner  # type: ignore[attr-defined]
        pl_module.training_step = training_step

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The module is as it was.

        Args:
            trainer: a Trainer of transformers, TRL or sentence-transformers.
            pl_module: the LightningModule.
            stage: as Lightning passes it.
        """
        step = vars(pl_module).get("training_step")
        if stage != "fit" or not hasattr(step, "inner"):
            return
        del pl_module.training_step
        # the module had one of its own, beside its class's
        if pl_module.training_step != step.inner:
            pl_module.training_step = step.inner

    def _step(self, pl_module: Any, inner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []

        def forward() -> Tensor | None:
            results.append(inner(batch, *args, **kwargs))
            outputs, _ = watch.take()
            if self.logits is not None:
                outputs = [self.logits(output) for output in outputs]
            return predictions(outputs)

        if not (self.valid is not None and self.reg.reads_outputs):
            valid = None
        else:
            valid = self.valid(batch)
        with watching(self.reg.model, self.reg) as watch:
            total, terms = self.reg.loss(
                forward,
                lambda _: loss_of(results.pop(0)),
                logits=lambda out: require(out, pl_module),
                valid=valid,
            )
        pl_module.log_dict({f"dampen/{name}": value.detach() for name, value in terms.items()})
        return total

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            self.reg.attach_optimizer(optimizer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.estimated_stepping_batches
        if steps and steps != float("inf"):
            done = trainer.global_step / steps
        else:
            done = 0.0
        self.reg.progress(min(1.0, done))

    def state_dict(self) -> dict[str, Any]:
        return self.reg.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reg.load_state_dict(state_dict)


def check(pl_module: Any, reg: Handle) -> None:
    """Raise where a LightningModule cannot be trained with a regularization.

    Args:
        pl_module: the LightningModule.
        reg: the handle that `dampen.regularize` returned.
    """
    if all(reg.model is not m for m in pl_module.modules()):
        raise ValueError(
            f"{type(pl_module).__name__} does not hold the model that was regularized (a "
            f"{type(reg.model).__name__}). "
            "Regularize the module itself, or what it keeps as an attribute."
        )
    if not pl_module.automatic_optimization:
        raise ValueError(
            f"{type(pl_module).__name__} has automatic_optimization=False, so its "
            "training_step owns the loss. Write loss, terms = reg.loss(lambda: self(x), "
            "criterion) there and self.manual_backward(loss), without this callback."
        )


def loss_of(result: Any) -> Tensor:
    """The loss that a training_step returned, alone or under "loss".

    Args:
        result: what training_step returned.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor):
        return loss
    raise TypeError(
        f"training_step returned {type(result).__name__}, neither a loss nor a dict with 'loss': a "
        "step that is "
        "skipped has no penalties either. Return a loss."
    )


def require(found: Tensor | None, pl_module: nn.Module) -> Tensor:
    """Predictions to compare, or an error.

    Args:
        found: predictions, or None.
        pl_module: the LightningModule.
    """
    if found is None:
        raise TypeError(
            f"two passes are compared by the model's logits, but the calls of the regularized "
            "model in "
            f"{type(pl_module).__name__}.training_step gave none. Let it return a tensor or an "
            "object with .logits, or say where they are: "
            "Regularize(reg, logits=lambda out: out['scores'])."
        )
    return found


def setup(fabric: Any, reg: Handle, *optimizers: torch.optim.Optimizer) -> Any:
    """`fabric.setup(reg.model, *optimizers)`, after which `reg.loss(lambda: model(x), ...)` and
    `fabric.backward(loss)` train as in any loop; with `fabric.save(path, {"reg":
    reg.state_dict()})` the handle's state goes along.

    Args:
        fabric: the Fabric.
        reg: the handle that `dampen.regularize` returned.
        optimizers: of the model's parameters.
    """
    if type(reg.model).__name__ == "_FabricModule":
        raise ValueError(
            "the model went through fabric.setup before it was regularized. Regularize first."
        )
    for optimizer in optimizers:
        reg.attach_optimizer(optimizer)
    return fabric.setup(reg.model, *optimizers)
