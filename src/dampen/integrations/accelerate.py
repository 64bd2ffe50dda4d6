"""Accelerate: regularize, then `prepare`; the loop is the user's own.

    reg = dampen.regularize(model, methods)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    dampen.integrations.accelerate.install(accelerator, reg)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss, terms = reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y))
            # divides by gradient_accumulation_steps, penalties too
            accelerator.backward(loss)

`accelerator.save_state` and `load_state` then keep schedules and learned values.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dampen.handle import Handle


def install(accelerator: Any, reg: Handle) -> None:
    """Check that `reg` sits inside what was prepared, and let `save_state` and `load_state` carry
    its state.

    Args:
        accelerator: the Accelerator.
        reg: the handle that `dampen.regularize` returned.
    """
    prepared = [m for m in accelerator._models if any(inner is reg.model for inner in _modules(m))]
    if accelerator._models and not prepared:
        names = ", ".join(type(accelerator.unwrap_model(m)).__name__ for m in accelerator._models)
        raise ValueError(
            f"the regularized {type(reg.model).__name__} is none of the prepared models ({names}). "
            "Regularize first "
            "and prepare that same object: reg = dampen.regularize(model, ...); model = "
            "accelerator.prepare(model)."
        )
    if any(known is reg for known in accelerator._custom_objects):
        raise ValueError(
            "this regularization is registered with the accelerator already: install it once."
        )
    accelerator.register_for_checkpointing(reg)
    for optimizer in accelerator._optimizers:
        reg.attach_optimizer(optimizer)


def regularize(accelerator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Handle:
    """`dampen.regularize(model, ...)` that refuses a model which `accelerator.prepare` has taken
    already.

    Args:
        accelerator: the Accelerator.
        model: a model that `accelerator.prepare` has not taken.
        kwargs: as for `dampen.regularize`.
        args: as for `dampen.regularize`.
    """
    if any(model is m or accelerator.unwrap_model(m) is model for m in accelerator._models):
        raise ValueError(
            f"this {type(model).__name__} was prepared already: what prepare wraps (DDP, FSDP, "
            "mixed precision) must "
            "lie around the regularizers. Regularize first: "
            "reg = dampen.regularize(model, ...), then accelerator.prepare(model)."
        )
    from dampen.handle import regularize as plain

    return plain(model, *args, **kwargs)


def _modules(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return list(model.modules())
    return []
