"""Condition numbers of the tokens on their way through a Transformer, layer by layer.

Always Skip Attention (arXiv 2505.01996): the output of self-attention is badly conditioned, and the
skip around it repairs that. kappa is the largest over the smallest singular value of one sample's
token matrix (N, D), in float64.
"""

from __future__ import annotations

import math
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
from dampen.regularizer import BranchCall


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

    A decoder's cross-attention is attention2.
    """

    name: str
    conditions: dict[str, Condition]


@dataclass(frozen=True)
class Conditioning:
    """Condition numbers by layer. Print it for a table of mean ln kappa."""

    layers: tuple[LayerConditions, ...]

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
        return "\n".join(lines)


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
        call(model, inputs)
    for plan, probe in probes:
        for i, run in enumerate(probe.runs):
            if len(probe.runs) == 1:
                name = plan.name
            else:
                name = f"{plan.name} (run {i + 1})"
            layers.append(LayerConditions(name, run))
    if not layers:
        raise RuntimeError(
            f"{type(model).__name__} ran without running any of its {len(probes)} layers."
        )
    return Conditioning(tuple(layers))


class ConditionProbe:
    """Condition numbers during training: a callback for the built-in trainer, or for any loop, that
    answers every k steps.

    `probe(step, model, batch)` gives plain data for a record when `step` is a multiple of `every`,
    else an empty dict. A batch is what the model takes, (inputs, labels), a mapping with "labels",
    or the built-in trainer's mapping with "inputs" and "target".

    Args:
        every: measure each so many steps.
        samples: how many samples of a batch; None: all.
        spectrum: also keep singular values.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> probe = ConditionProbe(every=100, samples=4)
    >>> batch = (torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.long))  # synthetic
    >>> [sorted(probe(step, model, batch)) for step in (0, 1, 100)]
    [['layers', 'step'], [], ['layers', 'step']]
    """

    def __init__(self, every: int, samples: int | None = 16, spectrum: bool = False) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"ConditionProbe(every=...) is a number of steps, at least 1, got {every!r}."
            )
        self.every, self.samples, self.spectrum = every, samples, spectrum

    def __call__(self, step: int, model: nn.Module, batch: Any) -> dict[str, Any]:
        if step % self.every:
            return {}
        found = measure_conditioning(
            model, inputs_of(batch), samples=self.samples, spectrum=self.spectrum
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
