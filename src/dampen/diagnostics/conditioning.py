"""The bound of Always Skip Attention (arXiv 2505.01996), proposition 4.1, on attention without
softmax.

Condition numbers of the tokens on their way through a Transformer, layer by layer.

Always Skip Attention (arXiv 2505.01996): the output of self-attention is badly conditioned, and the
skip around it repairs that. kappa is the largest over the smallest singular value of one sample's
token matrix (N, D), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dampen.diagnostics.probing import (
    Probe,
    batch_first,
    call,
    in_float64,
    map_tensors,
    probed,
    unwrapped,
    valid_tokens,
)
from dampen.hooks.find import LayerPlan, is_cross
from dampen.hooks.roles import weight_of
from dampen.regularizer import BranchCall


def linear_attention_condition(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """kappa of X Wq Wk^T X^T X Wv for tokens X (..., N, D) and weights (D, D), in float64.

    Args:
        x: tokens (..., N, D).
        wq: (D, D), y = x W.
        wk: (D, D).
        wv: (D, D).
    """
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    return _kappa(x @ (wq @ wk.mT) @ (x.mT @ (x @ wv)))


def linear_attention_bound(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """An upper bound of that number: C kappa(X)^3 (proposition 4.1).

    With X = U S V^T the output is U S (V^T Wq Wk^T V) S^2 (V^T Wv), so C = kappa(V^T Wq Wk^T V)
    kappa(V^T Wv). With at least as many tokens as channels V is square and C at most kappa(Wq)
    kappa(Wk) kappa(Wv), the proposition's constant; with fewer tokens the constant has to look at
    the weights on the tokens' own space, as it does here, because Wq Wk^T may be singular there.

    Args:
        x: tokens (..., N, D).
        wq: (D, D), y = x W.
        wk: (D, D).
        wv: (D, D).
    """
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    _, s, vh = torch.linalg.svd(x, full_matrices=False)
    constant = _kappa(vh @ (wq @ wk.mT) @ vh.mT) * _kappa(vh @ wv)
    out: Tensor = constant * (s[..., 0] / s[..., -1]) ** 3
    return out


@contextmanager
def linear_conditions(
    plans: Sequence[LayerPlan], valid: Tensor | None, enabled: bool = True
) -> Iterator[dict[str, dict[str, list[tuple[tuple[float, ...], None, float]]]]]:
    """While the body runs the model: kappa of each layer's attention without softmax, and its
    bound, per sample, each with the ceiling that float64 can resolve.

    All heads count as one, without biases. Layers whose maps are not three square ones (grouped
    queries, cross-attention), and padded batches, are left out.

    Args:
        plans: the layers to watch.
        valid: (B, N) bool, False on padding; None: all tokens count.
        enabled: False: watch nothing.
    """
    found: dict[str, dict[str, list[tuple[tuple[float, ...], None, float]]]] = {}
    hooks = []
    for plan in plans if enabled and valid is None else []:
        for name, module in plan.attentions.items():
            if is_cross(name, module) or len(plan.attentions) > 1:
                weights = None
            else:
                weights = _weights(plan, name, module)
            if weights is not None:
                hooks.append(
                    module.register_forward_pre_hook(_hook(plan, weights, found), with_kwargs=True)
                )
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hook(plan: LayerPlan, weights: tuple[Tensor, Tensor, Tensor], found: dict[str, Any]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if x.dim() != 3:
            return
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            x = x.transpose(0, 1)
        here = found.setdefault(plan.name, {"linear_attention": [], "bound": []})
        ceiling = 1 / (torch.finfo(torch.float64).eps * max(x.shape[-2:]))
        for kind, measure in (
            ("linear_attention", linear_attention_condition),
            ("bound", linear_attention_bound),
        ):
            here[kind].append((tuple(measure(x, *weights).tolist()), None, ceiling))

    return look


def _weights(plan: LayerPlan, name: str, module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """Wq, Wk, Wv as (D, D) with y = x W, where they are three square maps of one input."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is not None:
            parts = list(module.in_proj_weight.chunk(3))
        else:
            parts = []
    else:
        maps = {p.role: weight_of(p.module) for p in plan.linears.values() if p.attention == name}
        if "qkv" in maps:
            parts = list(maps["qkv"].chunk(3))
        else:
            parts = [maps[r] for r in "qkv" if r in maps]
    if len(parts) != 3 or any(w.shape[0] != w.shape[1] or w.shape != parts[0].shape for w in parts):
        return None
    return parts[0].detach().mT, parts[1].detach().mT, parts[2].detach().mT


def _kappa(x: Tensor) -> Tensor:
    s = torch.linalg.svdvals(x)
    floor = torch.finfo(torch.float64).eps * max(x.shape[-2:])
    out: Tensor = s[..., 0] / torch.maximum(s[..., -1], floor * s[..., 0]).clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return out


@dataclass(frozen=True)
class Condition:
    """Condition numbers of one kind of token matrix, one per sample."""

    numbers: tuple[float, ...]
    spectrum: Tensor | None = None  # (B, min(N, D)) singular values, largest first, on request
    ceiling: float = math.inf  # where float64 cannot separate the matrix from a singular one

    @property
    def capped(self) -> int:
        """How many of the samples are at the ceiling: their kappa is at least this, perhaps
        infinite."""
        return sum(number > 0.999 * self.ceiling for number in self.numbers)

    @property
    def log_mean(self) -> float:
        """Mean of ln kappa, the number in the paper's tables."""
        return math.fsum(map(math.log, self.numbers)) / len(self.numbers)

    @property
    def log_sd(self) -> float:
        """Standard deviation of ln kappa over the samples."""
        mean, n = self.log_mean, len(self.numbers)
        if n > 1:
            return math.sqrt(math.fsum((math.log(k) - mean) ** 2 for k in self.numbers) / (n - 1))
        return 0.0

    @property
    def median(self) -> float:
        return torch.tensor(self.numbers, dtype=torch.float64).median().item()

    def to_json(self) -> dict[str, Any]:
        """Plain data: n, ln kappa (mean, sd), kappa (median, largest), and the mean spectrum if it
        was requested."""
        plain: dict[str, Any] = {
            "n": len(self.numbers),
            "log_mean": self.log_mean,
            "log_sd": self.log_sd,
            "median": self.median,
            "largest": max(self.numbers),
        }
        if self.capped:
            plain["capped"] = self.capped
        if self.spectrum is not None:
            plain["spectrum"] = self.spectrum.mean(0).tolist()
        return plain


@dataclass(frozen=True)
class LayerConditions:
    """What one layer did to the tokens: tokens, attention, attention+skip, ffn, ffn+skip.

    A decoder's cross-attention is attention2. On request also linear_attention and its bound.
    """

    name: str
    conditions: dict[str, Condition]


@dataclass(frozen=True)
class Conditioning:
    """Condition numbers by layer. Print it for a table of mean ln kappa.

    `notes` name what was requested and could not be measured, and why.
    """

    layers: tuple[LayerConditions, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for records: one entry per layer."""
        return [
            {"name": layer.name, **{kind: c.to_json() for kind, c in layer.conditions.items()}}
            for layer in self.layers
        ]

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(kind for layer in self.layers for kind in layer.conditions))
        width = max(len("mean ln kappa"), *(len(layer.name) for layer in self.layers))
        lines = [f"{'mean ln kappa':<{width}}" + "".join(f"  {kind:>16}" for kind in kinds)]
        for layer in self.layers:
            cells = (layer.conditions.get(kind) for kind in kinds)
            lines.append(f"{layer.name:<{width}}" + "".join(f"  {_cell(c):>16}" for c in cells))
        if any(c.capped for layer in self.layers for c in layer.conditions.values()):
            lines.append("> at least: in some samples the matrix is singular in float64")
        return "\n".join([*lines, *self.notes])


def _cell(condition: Condition | None) -> str:
    if condition is None:
        return "-"
    return f"{'>' if condition.capped else ''}{condition.log_mean:.2f}"


def singular_values(x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Singular values (B, r) of tokens (B, N, D), or (B, H, W, D), in float64, and how many of them
    count per sample.

    Padded tokens count as zero rows, which add zeros to the end of the spectrum: those do not
    count.

    Args:
        x: tokens (B, N, D).
        valid: (B, N) bool, False on padding; None: all tokens count.
    """
    x = x.detach().flatten(1, -2).double()
    rank = torch.full((len(x),), min(x.shape[1:]), device=x.device)
    if valid is not None and valid.shape == x.shape[:2]:
        x = x * valid.unsqueeze(-1)
        rank = valid.sum(1).clamp(max=x.shape[2])
    return torch.linalg.svdvals(x), rank


def condition_of(x: Tensor, valid: Tensor | None = None, spectrum: bool = False) -> Condition:
    """kappa of each sample's token matrix.

    It ends at 1 / (machine epsilon x longer side), about 1e13, where a matrix is singular to
    float64; tokens from a float32 model are so from about 1e7 on, and the number then says no more
    than that.

    Args:
        x: tokens (B, N, D).
        valid: (B, N) bool, False on padding; None: all tokens count.
        spectrum: also return the singular values.

    >>> condition_of(torch.diag(torch.tensor([4.0, 2.0, 1.0])).unsqueeze(0)).numbers
    (4.0,)
    """
    if not torch.isfinite(x).all():
        raise ValueError("the tokens hold NaN or infinity: the model has diverged.")
    s, rank = singular_values(x, valid)
    largest = s[:, 0]
    smallest = s.gather(1, (rank - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    floor = torch.finfo(torch.float64).eps * max(x.shape[-1], x.flatten(1, -2).shape[1])
    kappa = torch.where(largest > 0, largest / torch.maximum(smallest, floor * largest), 1 / floor)
    return Condition(tuple(kappa.tolist()), s if spectrum else None, 1 / floor)


class _BranchProbe(Probe):
    """Writes down the condition numbers of everything around its block's residual additions."""

    def __init__(self, spectrum: bool, valid: Tensor | None, transpose: bool = False) -> None:
        super().__init__()
        self.spectrum, self.valid, self.transpose = spectrum, valid, transpose
        # a shared layer runs several times
        self.runs: list[dict[str, Condition]] = []
        self.now: dict[str, Condition] = {}

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        count = sum(name.rstrip("23456789") == call.role for name in self.now)
        name = call.role if not count else f"{call.role}{count + 1}"
        self.now[name] = self._condition(b)
        self.now[f"{name}+skip"] = self._condition(call.residual + b)
        return b

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        self.runs.append({"tokens": self._condition(x), **self.now})
        self.now = {}
        return y

    def _condition(self, x: Tensor) -> Condition:
        return condition_of(x.transpose(0, 1) if self.transpose else x, self.valid, self.spectrum)


@torch.no_grad()
def measure_conditioning(
    model: nn.Module,
    inputs: Any,
    *,
    samples: int | None = None,
    spectrum: bool = False,
    bound: bool = False,
    double: bool = False,
    valid: Tensor | None = None,
) -> Conditioning:
    """Condition numbers, layer by layer: tokens in, attention without and with its skip,
    feed-forward without and with.

    "Without" is the residual branch as it is about to be added, "with" is its sum with the residual
    stream, whether or not the model adds it: on a model under `SkipAblation` the first is what it
    uses, on a plain one the second. The model runs once, in eval mode, and is left as it was,
    regularized or not.

    Args:
        inputs: one batch: a tensor, a tuple (positional) or a mapping (keywords; `attention_mask`
            (B, N) marks the padding).
        samples: only that many of the batch.
        spectrum: keep all singular values.
        bound: also kappa of the layer's attention without softmax, and the bound of proposition 4.1
            on it. Where the tokens are singular, as behind a fresh LayerNorm with as many tokens as
            channels, it says nothing, and the numbers are marked as capped.
        double: run a copy of the model in float64, for condition numbers beyond 1e7.
        valid: (B, N) bool, False on padding, where the inputs do not mark it.

    >>> import dampen
    >>> _ = torch.manual_seed(0)
    >>> model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> result = measure_conditioning(model, torch.randn(4, 3, 16, 16))  # synthetic images
    >>> list(result.layers[0].conditions)
    ['tokens', 'attention', 'attention+skip', 'ffn', 'ffn+skip']
    """
    model = unwrapped(model)
    if samples is not None:
        inputs = map_tensors(inputs, lambda t: t[:samples])
        valid = None if valid is None else valid[:samples]
    if double:
        model, inputs = in_float64(model, inputs)
    valid = valid_tokens(inputs) if valid is None else valid
    layers = []
    with probed(model, lambda: _BranchProbe(spectrum, valid)) as probes:
        for plan, probe in probes:
            probe.transpose = not batch_first(plan)
        with linear_conditions([plan for plan, _ in probes], valid, enabled=bound) as linear:
            call(model, inputs)
    for plan, probe in probes:
        for i, run in enumerate(probe.runs):
            if len(probe.runs) == 1:
                name = plan.name
            else:
                name = f"{plan.name} (run {i + 1})"
            extra = {
                k: condition
                for k, found in linear.get(plan.name, {}).items()
                for condition in found[i : i + 1]
            }
            layers.append(
                LayerConditions(name, {**run, **{k: Condition(*v) for k, v in extra.items()}})
            )
    if not layers:
        raise RuntimeError(
            f"{type(model).__name__} ran without running any of its {len(probes)} layers."
        )
    return Conditioning(
        tuple(layers), tuple(_without_bound(probes, linear, valid)) if bound else ()
    )


def _without_bound(probes: Any, linear: dict[str, Any], valid: Tensor | None) -> list[str]:
    """Which layers have no bound, and why."""
    if valid is not None:
        return ["no bound: it is for batches without padding"]
    why = (
        "it is for self-attention of a sequence with three square maps "
        "(no grouped queries, no cross-attention)"
    )
    missing = [plan.name for plan, _ in probes if plan.name not in linear]
    if missing:
        return [f"no bound for {', '.join(missing)}: {why}"]
    return []


class ConditionProbe:
    """Condition numbers during training: a callback for the lab, or for any loop, that answers
    every k steps.

    `probe(step, model, batch)` gives plain data for a record when `step` is a multiple of `every`,
    else an empty dict. A batch is what the model takes, (inputs, labels), a mapping with "labels",
    or the lab's mapping with "inputs" and "target".

    Args:
        every: measure each so many steps.
        samples: how many samples of a batch; None: all.
        spectrum: also keep singular values.
        bound: also measure attention without softmax and its bound.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> probe = ConditionProbe(every=100, samples=4)
    >>> batch = (torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))  # synthetic
    >>> [sorted(probe(step, model, batch)) for step in (0, 1, 100)]
    [['layers', 'step'], [], ['layers', 'step']]
    """

    def __init__(
        self, every: int, samples: int | None = 16, spectrum: bool = False, bound: bool = False
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"ConditionProbe(every=...) is a number of steps, at least 1, got {every!r}."
            )
        self.every, self.samples, self.spectrum, self.bound = every, samples, spectrum, bound

    def __call__(self, step: int, model: nn.Module, batch: Any) -> dict[str, Any]:
        if step % self.every:
            return {}
        found = measure_conditioning(
            model, inputs_of(batch), samples=self.samples, spectrum=self.spectrum, bound=self.bound
        ).to_json()
        return {"step": step, "layers": found}


def inputs_of(batch: Any) -> Any:
    """What of a training batch the model takes.

    Args:
        batch: a batch as the trainer gives it to the model.
    """
    if isinstance(batch, dict):
        if "inputs" in batch and "target" in batch:
            return batch["inputs"]
        return {k: v for k, v in batch.items() if k != "labels"}
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0]
    return batch
