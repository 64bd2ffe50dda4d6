"""Measure a trained model section by section, and show what was found.

What does not apply to a model says why and leaves the other sections alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from dampen.extensions import Registry, hint
from dampen.studies.diagnose.trained import Trained, inputs_of
from dampen.studies.files import read_json, write_json
from dampen.studies.report.packs import MEASURED
from dampen.studies.result import DIAGNOSIS_FORMAT, parse_diagnosis
from dampen.studies.store import RunStore
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
    """Measure every section (or only those named) and return plain data; the
    model is left as it was.

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
    """Accuracy with interval, NLL, Brier score, ECE over bins of equal width and of
    equal mass, reliability.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import measure_calibration

    return asdict(measure_calibration(t.model, t.batches("test", s.examples), bins=s.bins))


def gradient_variance(t: Trained, s: Settings) -> dict[str, Any]:
    """The spread of mini-batch gradients in training mode, with the regularizers and their
    penalties, not augmented.

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


# --- the diagnosis for people
#
# A diagnosis for people, one line per model and more where there is only one; and as kept in
# the folder of a trial.

FEW = 3


def diagnosis_table(results: Sequence[dict[str, Any]]) -> Table:
    """What the sections print: a few models side by side with everything, many
    models in a line each.

    Args:
        results: one diagnosis per model.
    """
    title = (
        f"{results[0]['data']['name']}: {results[0]['settings']['examples']} test examples at most"
    )
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    few = len(results) <= FEW
    shown = {
        title: (name, cell)
        for name, section in SECTIONS.items()
        for title, cell in section.columns.items()
        if (few or title in section.short) and any(r.get(name) for r in results)
    }
    cells = {
        title: [_cell(cell, r.get(name)) for r in results] for title, (name, cell) in shown.items()
    }
    table.add_column("")
    if few:
        for result in results:
            table.add_column(result["name"], justify="right", overflow="fold")
        for title, found in cells.items():
            table.add_row(title, *found)
        return table
    for title in cells:
        table.add_column(title, justify="right", no_wrap=True)
    for i, result in enumerate(results):
        table.add_row(result["name"], *(found[i] for found in cells.values()))
    return table


def layers_table(result: dict[str, Any]) -> Table | None:
    """Attention and conditioning by layer; None where neither was measured.

    Args:
        result: a diagnosis.
    """
    attention = {layer["name"]: layer for layer in result.get("attention", {}).get("layers", [])}
    conditions = {layer["name"]: layer for layer in result.get("conditioning", [])}
    if not attention and not conditions:
        return None
    kinds = list(dict.fromkeys(k for layer in conditions.values() for k in layer if k != "name"))
    table = Table(
        box=None,
        pad_edge=False,
        title="by layer; conditioning as mean ln kappa",
        title_justify="left",
    )
    for column in ("", "entropy", "of the largest", "head similarity", *kinds):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for name in dict.fromkeys([*attention, *conditions]):
        own, condition = attention.get(name, {}), conditions.get(name, {})
        cells = [_number(own.get(k)) for k in ("entropy_mean", "entropy_share", "head_similarity")]
        table.add_row(name, *cells, *(_number(condition.get(k, {}).get("log_mean")) for k in kinds))
    return table


def _cell(text: Callable[[Any], str], found: Any) -> str:
    """One cell of the table; a dash where a section was not measured, or not whole."""
    if not found:
        return "-"
    try:
        return text(found)
    except (KeyError, TypeError, ValueError):
        return "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def keep(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write the diagnosis where `dampen report` looks for it; sections of this trial that were
    measured before stay, with the settings they were measured with.

    Args:
        folder: the folder.
        result: a diagnosis.
    """
    import torch

    from dampen.studies.environment import describe

    before = _read(folder)
    old = before if before.get("trial") == result["trial"] else {}
    merged = {k: v for k, v in {**old, **result}.items() if k not in result["skipped"]}
    skipped = {**old.get("skipped", {}), **result["skipped"]}
    merged["skipped"] = {name: why for name, why in skipped.items() if name not in merged}
    now = dict.fromkeys(result["seconds"], result["settings"])
    merged["measured_with"] = {**_measured_with(old), **now}
    merged["seconds"] = {**old.get("seconds", {}), **result["seconds"]}
    merged["environment"] = describe(torch.get_num_threads(), "cpu")
    plain: dict[str, Any] = _plain(merged)
    parse_diagnosis(plain)  # what the report reads
    write_json(folder / MEASURED, plain)
    return plain


def kept(folder: Path, settings: Settings, only: Sequence[str] = ()) -> dict[str, Any] | None:
    """What was measured before, if it is of this trial, with these settings, and
    has everything requested.

    Args:
        folder: the folder.
        settings: how much to measure.
        only: names of sections; empty: all.
    """
    found = _read(folder)
    wanted = [name for name in SECTIONS if not only or name in only]
    if found.get("trial") != RunStore(folder).trial().id:
        return None
    used, now = _measured_with(found), _plain(settings.to_dict())
    for name in wanted:
        before = used.get(name) or {}
        if {
            key: before.get(key) for key in now
        } != now:  # a setting that exists no more decides nothing
            return None
    return found


def _measured_with(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of each section; records of the first kind had the same for all."""
    return found.get("measured_with") or dict.fromkeys(
        found.get("seconds", {}), found.get("settings")
    )


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MEASURED
    if not path.exists():
        return {}
    found = read_json(path)
    parse_diagnosis(found)
    return cast(dict[str, Any], found)


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists, and what is not a finite number is null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
