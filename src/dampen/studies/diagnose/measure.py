"""The measurements, section by section; what does not apply to a model says why and leaves the others alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.studies.diagnose.trained import Trained, inputs_of
from dampen.studies.result import DIAGNOSIS_FORMAT
from dampen.studies.trainer.optim import loss_of

COUNTS = ("examples", "attack_examples", "steps", "bins", "gradient_batches", "samples", "maps")


@dataclass(frozen=True)
class Settings:
    """How much to measure; all of it is part of the result. eps counts 1/255 of the pixels' range."""

    examples: int = 1000
    attack_examples: int = 256
    eps: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    steps: int = 10
    bins: int = 15
    gradient_batches: int = 20
    samples: int = 16  # for condition numbers and attention
    maps: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be 1 or more: got {getattr(self, name)}"
            for name in COUNTS
            if getattr(self, name) < 1
        ]
        if not self.eps or not all(0 < v < math.inf for v in self.eps):
            problems.append(
                f"eps must be positive numbers: got {', '.join(map(str, self.eps)) or 'none'}"
            )
        if problems:
            raise ValueError("; ".join(problems) + ".")


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
        raise ValueError(f"there is no section {unknown[0]!r}; known are {', '.join(SECTIONS)}.")
    chosen = [name for name in SECTIONS if not only or name in only]
    result: dict[str, Any] = {
        "format": DIAGNOSIS_FORMAT,
        "name": trained.name,
        "trial": trained.trial,
        "data": {"name": trained.data.name, "task": trained.data.task},
        "settings": asdict(settings),
    }
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for i, name in enumerate(chosen):
        progress(name, i, len(chosen))
        began = time.perf_counter()
        try:
            result[name] = SECTIONS[name](trained, settings)
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


def robustness(t: Trained, s: Settings) -> list[dict[str, Any]]:
    """FGSM, and PGD with steps of eps / 4, at each eps.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import fgsm, pgd

    pixels, data = t.pixels, t.batches("test", s.attack_examples)
    found = []
    for eps in (e / 255 for e in s.eps):
        found.append(fgsm(t.model, data, eps, pixels=pixels, seed=s.seed))
        found.append(
            pgd(t.model, data, eps, step=eps / 4, steps=s.steps, pixels=pixels, seed=s.seed)
        )
    return [asdict(one) for one in found]


def corruptions(t: Trained, s: Settings) -> dict[str, Any]:
    """Noise, blur and lost contrast at five severities.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.diagnostics import measure_corruptions

    return asdict(
        measure_corruptions(t.model, t.batches("test", s.examples), pixels=t.pixels, seed=s.seed)
    )


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


def attention_maps(t: Trained, s: Settings) -> dict[str, Any]:
    """Attention rollout of some test images, as pictures and as numbers; a PNG goes into the trial's folder.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    from dampen.studies.diagnose.measure import attention_pictures

    return attention_pictures(t, s.maps)


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


SECTIONS: dict[str, Callable[[Trained, Settings], Any]] = {
    "calibration": calibration,
    "robustness": robustness,
    "corruptions": corruptions,
    "gradient_variance": gradient_variance,
    "attention": attention,
    "conditioning": conditioning,
    "attention_maps": attention_maps,
    "generalization": generalization,
}
"""Name -> how to measure it. The names are the keys of diagnose.json, which the report reads."""


LARGEST = 64
"""Images are no larger than this in the record; a page holds many."""


def attention_pictures(t: Trained, count: int) -> dict[str, Any]:
    """Label, image, rollout map and prediction of the first test images of different classes.

    Args:
        t: the model with its data.
        count: how many images.
    """
    from dampen.diagnostics import attention_weights, overlay, rollout, save_images, token_map
    from dampen.diagnostics.predictions import in_mode, run
    from dampen.functional.grid import grid_of

    pixels = t.pixels
    batch = t.data.test.batch(_of_different_classes(t.data.test, count))
    inputs, target = batch["inputs"][0], batch["target"]
    images = pixels.from_data(inputs)
    with torch.no_grad(), in_mode(t.model):
        predicted = run(t.model, inputs).argmax(-1)
    weights = attention_weights(t.model, inputs)
    relevance = rollout(weights)
    rows, columns = grid_of(relevance.shape[-1], None)
    if rows * columns == relevance.shape[-1]:  # no class token: what all patches look at
        relevance = relevance.mean(1, keepdim=True).expand_as(relevance)
    maps = token_map(relevance)
    names = t.data.classes
    examples = [
        {
            "label": names[label],
            "predicted": names[said],
            "image": _rgb(image),
            "map": _rounded(found),
        }
        for label, said, image, found in zip(
            target.tolist(), predicted.tolist(), images, maps, strict=True
        )
    ]
    result: dict[str, Any] = {
        "what": "attention rollout, what the class token looks at",
        "examples": examples,
    }
    if t.picture is not None:
        size = (max(64, images.shape[-2]), max(64, images.shape[-1]))
        large = F.interpolate(images, size=size, mode="nearest").expand(-1, 3, -1, -1)
        strip = torch.cat([large, overlay(large, token_map(relevance, size=size))], dim=-2)
        result["file"] = save_images(strip, t.picture).name
        heads = head_maps(weights, large[0], size)
        result["heads_file"] = save_images(
            heads, t.picture.with_stem(f"{t.picture.stem}-heads")
        ).name
    return result


def head_maps(weights: Mapping[str, Tensor], image: Tensor, size: tuple[int, int]) -> Tensor:
    """What each head of each layer looks at in the first image: (heads, 3, layers * height, width), a layer per row.

    Args:
        weights: attention weights by layer.
        image: the first image.
        size: height and width of a map.
    """
    from dampen.diagnostics import overlay, token_map

    rows = []
    most = max(a.shape[1] for a in weights.values())
    for a in weights.values():
        seen = overlay(image.expand(a.shape[1], -1, -1, -1), token_map(a[0], size=size))
        rows.append(F.pad(seen, (0, 0, 0, 0, 0, 0, 0, most - a.shape[1]), value=1.0))
    return torch.cat(rows, dim=-2)


def _of_different_classes(split: Any, count: int) -> Tensor:
    """The first examples of as many classes as asked for, in order."""
    labels = split.batch(torch.arange(min(len(split), 1000)))["target"]
    first = torch.stack([(labels == c).nonzero()[0, 0] for c in labels.unique()])
    return first.sort().values[:count]


def _rgb(image: Tensor) -> list[list[list[int]]]:
    """Pixels in [0, 1] (C, H, W) as rows of RGB bytes, made smaller where they are many."""
    if max(image.shape[-2:]) > LARGEST:
        factor = LARGEST / max(image.shape[-2:])
        size = tuple(max(1, round(factor * side)) for side in image.shape[-2:])
        image = F.interpolate(image.unsqueeze(0), size=size, mode="area")[0]
    color = image if len(image) == 3 else image.mean(0, keepdim=True).expand(3, -1, -1)
    return (255 * color).round().clamp(0, 255).int().permute(1, 2, 0).tolist()


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(v, 4) for v in row] for row in values.tolist()]
