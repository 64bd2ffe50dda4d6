"""Values and gradients: do samples mix, does every parameter learn, is anything NaN,
which kernels attend?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import BatchNorm
from dampen.auditing.record import (
    UNFUSED,
    AuditedModel,
    Events,
    Forward,
    ForwardObserver,
    copied,
)
from dampen.auditing.report import Audit, AuditFinding
from dampen.containers import tensors_in, with_tensors
from dampen.handle import regularize
from dampen.hooks.discover.sites import find_layers
from dampen.hooks.patch import remove
from dampen.regularizer import BranchCall, Regularizer

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative difference that counts as a leak between samples; 2e-2 for 16-bit numbers."""


def examine_gradients(
    s: AuditedModel, audit: Audit, loss: Callable[[Any], Tensor] | None
) -> Events:
    """One training forward and backward: which parameters learn. What was drawn is returned.

    Args:
        s: the model.
        audit: to be filled.
        loss: of the output. None: the model's own, else the mean square of its outputs.
    """
    s.prepare(True, 1)
    observer = ForwardObserver(s.model, s.kept)
    with torch.enable_grad(), observer.observing() as record:
        output = s.call()
        value = loss_of(output, loss)
        if value is not None:
            value.backward()
    named = dict(s.model.named_parameters())
    frozen = [name for name, p in named.items() if not p.requires_grad]
    learning = {name: p for name, p in named.items() if p.requires_grad}
    without = [name for name, p in learning.items() if p.grad is None]
    audit.facts["parameters with gradient"] = f"{len(learning) - len(without)} of {len(named)}"
    audit.tested["parameters with gradient"] = (
        "one backward of the loss" if loss else "one backward of the output"
    )
    if value is None and learning:
        audit.findings.append(
            AuditFinding(
                "no_gradient", "problem", ("",), "no output depends on a parameter",
                "Nothing can be learned.",
                "remove torch.no_grad(), .detach() and .item() from forward",
            )
        )  # fmt: skip
    elif without:
        _find_without_gradient(audit, without, record, loss is not None)
    if frozen and len(frozen) < len(named):
        audit.findings.append(
            AuditFinding(
                "frozen", "note", tuple(frozen), f"{len(frozen)} of "
                                                 f"{len(named)} parameters are frozen",
                "They are not trained. Adapters and frozen backbones mean to do this.",
                "p.requires_grad_(True) for those that should learn",
            )
        )  # fmt: skip
    bad = [
        name for name, p in learning.items() if p.grad is not None and not p.grad.isfinite().all()
    ]
    _find_nan(s, audit, record, value, bad)
    _find_hidden(audit, record)
    addresses = {t.data_ptr() for t in tensors_in(output)}
    _find_kernels(s.model, audit, record, addresses)
    for p in named.values():
        p.grad = None
    return record


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """The loss, the user's or the model's own, or the mean square of all
    outputs that have a gradient.

    Args:
        output: of the model.
        loss: the user's.
    """
    if loss is not None:
        value = loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TypeError(
                "audit(loss=...) is a function of the model's output "
                "that returns one number as a tensor, got "
                f"{type(value).__name__}"
                f"{f' of shape {tuple(value.shape)}' if isinstance(value, Tensor) else ''}."
            )
        return value if value.requires_grad else None
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own.reshape(())
    parts = [t for t in tensors_in(output) if t.requires_grad and not t.is_nested]
    if not parts:
        return None
    return torch.stack([t.abs().float().square().mean() for t in parts]).sum()


def _find_without_gradient(audit: Audit, names: list[str], record: Events, given: bool) -> None:
    """Parameters without gradient: of modules that ran, and of those that did not."""
    ran = [n for n in names if n.rpartition(".")[0] in record.called]
    idle = [n for n in names if n not in ran]
    if ran:
        meaning = "It never learns, and DistributedDataParallel stops with an error."
        if given:
            meaning = f"The loss does not reach it. {meaning}"
        audit.findings.append(
            AuditFinding(
                "no_gradient", "problem", tuple(ran), "its module runs, and it gets no gradient",
                meaning,
                "remove .detach(), torch.no_grad() or .data on its way to the loss; or freeze it: "
                "p.requires_grad_(False)",
            )
        )  # fmt: skip
    if idle:
        audit.findings.append(
            AuditFinding(
                "no_gradient", "warning", tuple(idle), "the forward does not use it",
                "DistributedDataParallel needs find_unused_parameters=True.",
                "remove it, or pass an example that uses it",
            )
        )  # fmt: skip


def _find_nan(
    s: AuditedModel, audit: Audit, record: Events, value: Tensor | None, bad: list[str]
) -> None:
    where: tuple[str, ...]
    if record.nan is not None:
        where, what = (record.nan,), "is the first module that returns NaN"
    elif value is not None and not bool(value.isfinite()):
        where, what = ("",), "the loss is not a finite number"
    elif bad:
        where, what = tuple(bad), "the gradient is not finite, although the output is"
    else:
        return
    audit.findings.append(
        AuditFinding(
            "nan", "problem", where, what, "One such step destroys the weights.",
            "torch.autograd.set_detect_anomaly(True) names the "
            "operation; see hidden_rows for attention",
        )
    )  # fmt: skip


def _find_hidden(audit: Audit, record: Events) -> None:
    rows: dict[str, dict[str, int]] = {}
    for (where, outcome), n in record.hidden.items():
        rows.setdefault(outcome, {})[where] = n
    audit.facts["fully hidden queries"] = sum(sum(found.values()) for found in rows.values())
    for outcome, found in rows.items():
        meaning = {
            "NaN": "Softmax over nothing is NaN, and its gradient reaches every weight.",
            "zeros": "This kernel returns zeros. Others return NaN.",
            "uniform weights": "They look at every hidden key alike. "
            "This matters where their output is used.",
        }[outcome]
        audit.findings.append(
            AuditFinding(
                "hidden_rows", "problem" if outcome == "NaN" else "note", tuple(found),
                f"{sum(found.values())} queries may look at no key: the result is {outcome}",
                meaning,
                "let each query see one key: mask[..., 0] |= ~mask.any(-1)",
            )
        )  # fmt: skip


def _find_kernels(model: nn.Module, audit: Audit, record: Events, outputs: set[int]) -> None:
    attentions = _attention_names(model)
    calls = [
        a
        for a in record.attention
        if a.kernel != "explicit softmax" or a.weights or a.module in attentions
    ]
    if calls:
        audit.facts["attention kernels"] = dict(Counter(a.kernel for a in calls))
        audit.tested["attention kernels"] = "the operators that a training forward called"
    reasons: dict[tuple[str, str], list[str]] = {}
    for a in calls:
        fused = [("its mask", a.without_mask), ("dropout", a.without_dropout)]
        cause = [why for why, other in fused if other and other not in UNFUSED]
        if a.kernel not in UNFUSED:
            better = a.kernel != "flash" and a.without_mask == "flash"
            cause = ["its mask (flash would run without it)"] if better else []
        if a.weights:
            cause = ["need_weights=True"]
        if not cause and a.kernel == "explicit softmax":
            cause = ["the code of the module, which computes its own softmax"]
        if cause:
            reasons.setdefault((a.kernel, cause[0]), []).append(a.module)
    for (kernel, why), places in reasons.items():
        meaning, change = _REASONS.get(why, _REASONS["other"])
        audit.findings.append(
            AuditFinding(
                "attention_kernel", "note", tuple(dict.fromkeys(places)),
                f"runs as {kernel} because of {why}", meaning, change,
            )
        )  # fmt: skip
    for form, change in _MASKS.items():
        names = [a.module for a in calls if a.mask == form]
        if names:
            audit.findings.append(
                AuditFinding(
                    "attention_kernel", "note", tuple(dict.fromkeys(names)),
                    f"gets a mask that {_FORMS[form]}",
                    "On CUDA every mask rules flash out, and a slower kernel runs.", change,
                )
            )  # fmt: skip
    dropped = {w: (top, at) for w, (top, at) in record.weights.items() if top > 1.001}
    if dropped:
        returned = any(at in outputs for _, at in dropped.values())
        top = max(top for top, _ in dropped.values())
        audit.findings.append(
            AuditFinding(
                "dropped_weights", "warning" if returned else "note", tuple(dropped),
                f"nn.MultiheadAttention returns its weights after dropout: rows sum to {top:.2f}",
                "Weights that are shown or penalized in training are not the attention.",
                "read them in eval mode, or need_weights=False",
            )
        )  # fmt: skip


_REASONS = {
    "its mask": (
        "Without the mask a fused kernel would run, which stores no N x N weights.",
        "pass is_causal=True instead of a causal mask, or a mask that needs no gradient",
    ),
    "dropout": (
        "Without dropout a fused kernel would run on this device. On CUDA flash drops too.",
        "nothing to do on CUDA; on a CPU attention dropout 0, and FeedForwardDropout or DropPath",
    ),
    "need_weights=True": (
        "Weights that are returned are stored, N x N for each head.",
        "self.attn(x, x, x, need_weights=False)",
    ),
    "other": (
        "It stores all weights, N x N for each head.",
        "call F.scaled_dot_product_attention; transformers: attn_implementation='sdpa'",
    ),
}
"""Why attention is not fused: what it means, and the line that changes it."""
_FORMS = {"causal": "is causal", "hides nothing": "hides nothing", "other": "hides some keys"}
_MASKS = {
    "causal": "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "hides nothing": "pass attn_mask=None",
    "other": "nothing to do for padding; "
    "torch.nn.attention.flex_attention stays fused under a window or a bias",
}


def _attention_names(model: nn.Module) -> set[str]:
    return {
        name
        for name, m in model.named_modules()
        if "att" in type(m).__name__.lower() or "att" in name.rpartition(".")[2].lower()
    }


def examine_samples(s: AuditedModel, audit: Audit, axis: int | None) -> None:
    """Whether the output of a sample depends on the others, batch norm apart.

    Args:
        s: the model.
        audit: to be filled.
        axis: of the samples; None: the first, unless torch.nn's
            sequence-first modules say otherwise.
    """
    name = "samples independent"
    inputs = [t for t in tensors_in((s.args, s.kwargs)) if t.ndim]
    if not inputs:
        audit.facts[name] = None
        return
    results = {}
    for along in (0, 1) if axis is None else (axis,):
        results[along] = _leak(s, inputs, along)
        if results[along] is None or results[along] == "":
            break
        if axis is None and not any(_sequence_first(m) for m in s.model.modules()):
            break
    first = results[0 if axis is None else axis]
    audit.facts[name] = None if first is None else first == ""
    audit.tested[name] = (
        "all samples but one changed, the output of that one compared; "
        "without dropout, batch norm in eval mode"
        if first is not None
        else "not tested: needs 2 samples or more, and outputs that belong to one sample each"
    )
    if not first:
        return
    sequence_first = axis is None and results.get(1) == ""
    if sequence_first and _keeps_both_axes(s, inputs):
        audit.facts[name] = "along axis 1"
        audit.findings.append(
            AuditFinding(
                "samples_mix", "warning", (first[1:],),
                "the first axis mixes, the second does not: batch_first=False",
                "This is right where the example is (tokens, samples, "
                "features), else attention looks across the batch.",
                "batch_first=True, or audit(..., batch_axis=1) if the second axis holds the samples",
            )
        )  # fmt: skip
        return
    change = "compute means, norms and softmax over the features and tokens of a sample alone"
    if sequence_first:
        change = "batch_first=True in nn.MultiheadAttention, nn.TransformerEncoderLayer or the RNN"
    audit.findings.append(
        AuditFinding(
            "samples_mix", "problem", (first[1:],),
            "the output of a sample changes with the others of its "
            "batch; this module is the first that does",
            "Samples leak into each other, here or right before "
            "it, and predictions depend on the batch.", change,
        )
    )  # fmt: skip


def _sequence_first(module: nn.Module) -> bool:
    return getattr(module, "batch_first", True) is False


def _keeps_both_axes(s: AuditedModel, inputs: list[Tensor]) -> bool:
    """Whether outputs have samples and tokens where the input has them, so that
    either may be the batch."""
    shape = inputs[0].shape[:2]
    outputs = s.run(True).outputs
    return all(t.shape[:2] == shape for t in outputs if t.ndim)


def _leak(s: AuditedModel, inputs: list[Tensor], axis: int) -> str | None:
    """ "" where samples are independent, else ":" and the first module that mixes;
    None: cannot be tested."""
    if inputs[0].ndim <= axis or (size := inputs[0].shape[axis]) < 2:
        return None
    batch = size if axis == 0 else 0

    def run(keep: int | None) -> Forward:
        given = copied((s.args, s.kwargs))
        if keep is not None:
            given = with_tensors(given, lambda t: _with_others(t, keep, axis, size))
        other = AuditedModel(s.model, given[0], given[1], s.kept)
        return other.run(True, batch=batch, still=True, change=lambda: _freeze_norms(s.model))

    plain = run(None)
    compared = [i for i, t in enumerate(plain.outputs) if _has_samples(t, axis, size)]
    if not compared:
        return None
    for keep in (0, size - 1):
        changed = run(keep)
        for i in compared:
            x, y = plain.outputs[i], changed.outputs[i]
            if x.shape == y.shape and _differ(x.select(axis, keep), y.select(axis, keep)):
                if _is_square(x, size):
                    return None
                pairs = zip(plain.record.samples, changed.record.samples, strict=False)
                mixing = (name for (name, a), (_, b) in pairs if _differ(a[keep], b[keep], 1e-6))
                return ":" + next(mixing, "")
    return ""


def _has_samples(t: Tensor, axis: int, size: int) -> bool:
    return t.is_floating_point() and t.ndim > axis and t.shape[axis] == size


def _is_square(t: Tensor, size: int) -> bool:
    """Whether an output may hold samples against samples (CLIP), which depend on all of them."""
    return t.ndim == 2 and t.shape[0] == t.shape[1] == size


def _with_others(t: Tensor, keep: int, axis: int, size: int) -> Tensor:
    """A batch in which one sample stays and all others change: numbers grow, anything else becomes
    that sample's."""
    if t.ndim <= axis or t.shape[axis] != size:
        return t
    kept = t.detach().select(axis, keep).unsqueeze(axis)
    others = kept.expand_as(t).clone()
    if t.is_floating_point():
        steps = torch.linspace(0.1, 1.0, max(t.numel(), 1)).to(t).view_as(t)
        others = 3 * t.detach() + steps
    others.narrow(axis, keep, 1).copy_(kept)
    return others


def _freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.training = False


def _differ(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    limit = TOLERANCE.get(a.dtype, 2e-2) if tolerance is None else tolerance
    scale = float(a.double().abs().nan_to_num().max()) if a.numel() else 0.0
    both = (a.double() - b.double()).abs().nan_to_num()
    return bool(both.numel()) and float(both.max()) > limit * max(scale, 1e-12)


class BranchCounter(Regularizer):
    """Counts the residual branches of a forward, and changes nothing. No paper:
    a probe of the audit."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = [counts]  # in a list: clones of this probe share it

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        self.counts[0][call.role] += 1
        return b

    def __deepcopy__(self, memo: dict[int, Any]) -> BranchCounter:
        return BranchCounter(self.counts[0])


def examine_structure(s: AuditedModel, audit: Audit) -> None:
    """Depth, attentions and residual branches, as dampen finds them.

    Args:
        s: the model.
        audit: to be filled.
    """
    s.prepare(True)
    try:
        plans = find_layers(s.model)
    except ValueError:
        audit.facts["layers with attention"] = 0
        return
    audit.facts["layers with attention"] = len(plans)
    name = "residual branches"
    if "_dampen_model" in vars(s.model):
        audit.facts[name] = sum(plan.branches for plan in plans)
        audit.tested[name] = "expected from the modules, because the model is regularized"
        return
    counts: Counter[str] = Counter()

    def attach() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            regularize(s.model, BranchCounter(counts))

    try:
        s.run(True, light=True, change=attach)
    except (ValueError, TypeError, RuntimeError) as error:  # branches that cannot be followed
        audit.facts[name] = None
        audit.tested[name] = f"not tested: {str(error).splitlines()[0]}"
        return
    finally:
        if "_dampen_model" in vars(s.model):
            remove(s.model)
    audit.facts[name] = sum(counts.values())
    audit.tested[name] = "additions of a training forward, followed"
