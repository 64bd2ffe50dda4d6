"""The measurements, section by section; what does not apply to a model says why and leaves the others alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dampen.extensions import Registry, hint
from dampen.studies.diagnose.trained import Trained, inputs_of
from dampen.studies.result import DIAGNOSIS_FORMAT
from dampen.studies.trainer.optim import loss_of

COUNTS = ("examples", "bins", "gradient_batches", "samples")


@dataclass(frozen=True)
class Settings:
    """How much to measure; all of it is part of the result.

    `options` holds the options of sections that plug-ins add, such as {"robustness.eps": "2,8"}.
    """

    examples: int = 1000
    bins: int = 15
    gradient_batches: int = 20
    samples: int = 16  # for condition numbers and attention
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be 1 or more: got {getattr(self, name)}"
            for name in COUNTS
            if getattr(self, name) < 1
        ]
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with `options` only where there are some."""
        plain = asdict(self)
        return plain if self.options else {k: v for k, v in plain.items() if k != "options"}


@dataclass(frozen=True)
class Section:
    """One kind of measurement.

    Args:
        measure: from a model with its data and the settings to plain data. It raises ValueError
            with the reason where it does not apply.
        columns: titles of what `dampen diagnose` prints, each with the text of a cell.
        short: the columns that are printed where there are many models.
    """

    measure: Callable[[Trained, Settings], Any]
    columns: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    short: tuple[str, ...] = ()


def diagnose(
    trained: Trained,
    settings: Settings | None = None,
    only: Sequence[str] = (),
    progress: Callable[[str, int, int], None] = lambda section, done, total: None,
) -> dict[str, Any]:
    """Measure every section (or only those named) and return plain data; the model is left as it was.

    Args:
        trained: the model with its data.
        settings: how much to measure.
        only: names of sections; empty: all.
        progress: called with what is done.
    """
    settings = settings or Settings()
    unknown = [name for name in only if name not in SECTIONS]
    if unknown:
        raise ValueError(
            f"there is no section {unknown[0]!r}{hint('dampen.diagnoses', unknown[0], SECTIONS)}."
        )
    chosen = [name for name in SECTIONS if not only or name in only]
    result: dict[str, Any] = {
        "format": DIAGNOSIS_FORMAT,
        "name": trained.name,
        "trial": trained.trial,
        "data": {"name": trained.data.name, "task": trained.data.task},
        "settings": settings.to_dict(),
    }
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for i, name in enumerate(chosen):
        progress(name, i, len(chosen))
        began = time.perf_counter()
        try:
            result[name] = SECTIONS[name].measure(trained, settings)
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
        seconds[name] = round(time.perf_counter() - began, 2)
    return {**result, "skipped": skipped, "seconds": seconds}


def calibration(t: Trained, s: Settings) -> dict[str, Any]:
    """Accuracy with interval, NLL, Brier score, ECE over bins of equal width and of equal mass, reliability.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import measure_calibration

    return asdict(measure_calibration(t.model, t.batches("test", s.examples), bins=s.bins))


def gradient_variance(t: Trained, s: Settings) -> dict[str, Any]:
    """The spread of mini-batch gradients in training mode, with the regularizers and their penalties, not augmented.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import gradient_variance

    order = torch.randperm(len(t.data.train), generator=torch.Generator().manual_seed(s.seed))
    count = min(s.gradient_batches, len(order) // t.batch_size)
    picked = [
        t.data.train.batch(order[i * t.batch_size : (i + 1) * t.batch_size]) for i in range(count)
    ]
    batches = [{"batch": b, "labels": b["target"]} for b in picked]

    def loss(model: nn.Module, given: dict[str, Any], labels: Tensor) -> Tensor:
        batch = given["batch"]
        valid = batch.get("valid")

        def criterion(output: Any) -> Tensor:
            return loss_of(t.data, output, labels, valid, t.label_smoothing)

        if t.handle is None:
            return criterion(model(*batch["inputs"]))
        out: Tensor = t.handle.loss(lambda: model(*batch["inputs"]), criterion, valid=valid)[0]
        return out

    return asdict(gradient_variance(t.model, batches, loss=loss, seed=s.seed))


def attention(t: Trained, s: Settings) -> dict[str, Any]:
    """Entropy of the attention weights by head, and how alike the heads are, layer by layer.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import attention_entropy, attention_weights, head_similarity

    layers = []
    for name, weights in attention_weights(t.model, _some_inputs(t, s.samples)).items():
        entropy = attention_entropy(weights)
        highest = torch.log(torch.tensor(float(weights.shape[-1])))
        layer: dict[str, Any] = {
            "name": name,
            "entropy": entropy.tolist(),
            "entropy_mean": entropy.mean().item(),
        }
        layer["entropy_share"] = (
            entropy.mean() / highest
        ).item()  # of the entropy of equal weights
        layer["head_similarity"] = head_similarity(weights) if weights.shape[1] > 1 else None
        layers.append(layer)
    return {"samples": s.samples, "layers": layers}


def conditioning(t: Trained, s: Settings) -> list[dict[str, Any]]:
    """Condition numbers of the tokens around every residual branch.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import measure_conditioning

    inputs = _some_inputs(t, s.samples)
    padding = inputs[1] if isinstance(inputs, tuple) and inputs[1].dtype == torch.bool else None
    return measure_conditioning(
        t.model, inputs, valid=None if padding is None else ~padding
    ).to_json()


def generalization(t: Trained, s: Settings) -> dict[str, Any]:
    """Accuracy and calibration on training and on test data, and their differences.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import generalization_gap

    train, test = (t.batches(split, s.examples) for split in ("train", "test"))
    return asdict(generalization_gap(t.model, train, test, bins=s.bins))


def _some_inputs(t: Trained, count: int) -> Any:
    return inputs_of(t.data.test.batch(torch.arange(min(count, len(t.data.test)))))


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


SECTIONS: Registry[Section] = Registry(
    "dampen.diagnoses",
    {
        "calibration": Section(
            calibration,
            {
                "accuracy": lambda c: _percent(c["accuracy"]),
                "95 % interval": lambda c: (
                    f"{100 * c['accuracy_low']:.1f} to {_percent(c['accuracy_high'])}"
                ),
                "NLL": lambda c: f"{c['nll']:.3f}",
                "Brier": lambda c: f"{c['brier']:.3f}",
                "ECE": lambda c: f"{c['ece']:.3f}",
                "adaptive ECE": lambda c: f"{c['adaptive_ece']:.3f}",
            },
            short=("accuracy", "NLL", "ECE"),
        ),
        "gradient_variance": Section(
            gradient_variance, {"gradient variance": lambda v: f"{v['normalized']:.3f}"}
        ),
        "attention": Section(attention),
        "conditioning": Section(conditioning),
        "generalization": Section(
            generalization, {"gap": lambda g: _percent(g["accuracy_gap"])}, short=("gap",)
        ),
    },
)
"""Name -> how to measure it. The names are the keys of diagnose.json, which the report reads."""
