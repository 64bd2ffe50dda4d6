"""`dampen.audit`: what a model's dropout really does, and what is wrong in its
training and eval forward.

Everything is measured by what changes: a dropout is switched off and the output compared, a sample
is exchanged and the others are compared. The model is afterwards what it was. `overfitting` reads
curves of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dampen.auditing.dropouts import examine_dropouts
from dampen.auditing.randomness import (
    draws_of_a_call,
    examine_calls,
    examine_eval,
    examine_ranks,
    examine_recompute,
    in_process_group,
)
from dampen.auditing.record import AuditedModel
from dampen.auditing.report import KINDS, Audit, AuditFinding, Dropout
from dampen.auditing.state import untouched
from dampen.auditing.values import examine_gradients, examine_samples, examine_structure

__all__ = ["KINDS", "Audit", "AuditFinding", "Dropout", "audit"]


def audit(
    model: nn.Module,
    example: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    layers: bool = False,
    batch_axis: int | None = None,
    ignore: Sequence[str] = (),
    seconds: float = 60.0,
) -> Audit:
    """Measure what the dropout of a model does, and look for common faults.

    Which dropouts, drop paths and attention dropouts act in training and in eval, functional ones
    too. Whether a checkpoint's recompute, two calls and two ranks draw what they should, samples
    are independent and eval repeats itself. Which parameters get no gradient, which attention
    kernels run and why, where NaN may come from. Parameters, buffers, gradients, modes, hooks and
    generators are afterwards what they were.

    Args:
        model: any model, regularized or not.
        example: what the model is called with: a tensor, a tuple of arguments or a mapping of
            keywords. A real batch of two or more samples, with its padding.
        loss: a function of the output that returns the loss. Default: the model's own, else the
            mean square of its outputs.
        layers: also measure condition numbers and attention entropy of each layer.
        batch_axis: the axis of the samples. Default: the first.
        ignore: kinds of findings to leave out, see `dampen.auditing.KINDS`.
        seconds: how long the dropouts may take. Beyond it those of one family are tested together.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    >>> print(audit(model, torch.randn(2, 4)))
    Sequential: 1 of 1 dropouts act in training; no problems
      where  kind     rate  in training  in eval
      1      dropout  0.1   acts         off
    eval repeatable             yes
    two calls draw differently  yes
    parameters with gradient    4 of 4
    fully hidden queries        0
    ranks draw differently      only if seeded differently
    samples independent         yes
    layers with attention       0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"audit takes an nn.Module, got {type(model).__name__}.")
    unknown = [kind for kind in ignore if kind not in KINDS]
    if unknown:
        raise ValueError(
            f"audit(ignore=...): unknown kind {unknown[0]!r}. Known: {', '.join(KINDS)}."
        )
    model = unwrapped(model)
    args, kwargs = _arguments(example)
    found = Audit(type(model).__name__)
    if not model.training:
        found.findings.append(
            AuditFinding(
                "starts_in_eval", "note", ("",), "was given in eval mode",
                "Nothing drops until it is in train mode. from_pretrained returns models so.",
                "model.train() before training",
            )
        )  # fmt: skip
    with untouched(model) as kept:
        s = AuditedModel(model, args, kwargs, kept)
        mine = draws_of_a_call(s) if in_process_group() else []  # before anything is seeded
        examine_dropouts(s, found, seconds)
        examine_eval(s, found)
        examine_calls(s, found)
        record = examine_gradients(s, found, loss)
        examine_recompute(record, found)
        examine_ranks(s, found, mine)
        examine_samples(s, found, batch_axis)
        examine_structure(s, found)
        if layers:
            s.prepare(False)
            _measure_layers(model, example, found)
    found.findings = [f for f in found.findings if f.kind not in ignore]
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, DistributedDataParallel and DataParallel.

    Args:
        model: as the user has it.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    return model


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise TypeError(
        "audit(model, example): example is what the model is called with: a "
        "tensor, a tuple of arguments or a dict of "
        f"keywords, got {type(example).__name__}."
    )


def _measure_layers(model: nn.Module, example: Any, found: Audit) -> None:
    """Condition numbers and attention entropy, layer by layer."""
    from dampen.diagnostics import attention_entropy, attention_weights, measure_conditioning

    try:
        conditions = measure_conditioning(model, example).to_json()
        weights = attention_weights(model, example)
    except (RuntimeError, ValueError) as error:  # a model whose layers cannot be probed
        found.facts["layers"] = f"not measured: {error}"
        return
    found.layers = conditions
    for layer in found.layers:
        entropies = weights.get(layer["name"])
        if entropies is not None:
            layer["attention_entropy"] = attention_entropy(entropies).mean().item()
