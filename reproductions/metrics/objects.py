"""Object detection: average precision as COCO measures it."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from dampen.studies.plugins import LabError, Metrics, Split, require_batches
from reproductions.data.objects import ObjectSplit
from reproductions.models.boxes import corners

MOST = 100
"""Detections of an image that count: COCO's number."""


def missing_packages() -> str:
    """What is missing here to measure objects, and how to get it; plans ask before anything is
    trained.
    """
    missing = [
        n for n in ("faster_coco_eval", "torchvision") if importlib.util.find_spec(n) is None
    ]
    told = f"Average precision needs {' and '.join(missing)}, not installed here."
    return f"{told} Run: pip install faster-coco-eval torchvision" if missing else ""


class ObjectMetrics(Metrics):
    """`ap` (mean over IoU 0.50 to 0.95), `ap50`, `ap75`, and `ap50@CLASS` for each class that
    occurs.

    torchmetrics' MeanAveragePrecision with the evaluator faster-coco-eval, in pixels of the
    original images. Each pair of query and class is a detection; the 100 most certain ones of an
    image count. Objects that are to be ignored (crowds, difficult ones) are handed over as crowds.
    """

    def __init__(self, split: Split, classes: list[str]):
        if not isinstance(split, ObjectSplit):
            raise TypeError(f"Objects are measured on an ObjectSplit: got {type(split).__name__}.")
        if problem := missing_packages():
            raise LabError(problem)
        from torchmetrics.detection import MeanAveragePrecision

        self.split, self.classes, self._next = split, classes, 0
        self.precision = MeanAveragePrecision(
            backend="faster_coco_eval",
            class_metrics=True,
            extended_summary=True,
            sync_on_compute=False,
        )
        self.precision.warn_on_many_detections = False  # more than 100 never reach it

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """`logits` are (B, Q, classes + 4): class logits, then center and size; images are those of
        `index`, else the next ones of the split."""
        if index is None:
            index = torch.arange(self._next, self._next + len(logits))
        self._next += len(logits)
        found, truth = [], []
        for i, rows in zip(index.tolist(), logits.detach().float().cpu(), strict=True):
            example = self.split.examples[i]
            scale = torch.tensor([example.width, example.height] * 2)
            found.append(best_detections(rows, len(self.classes), scale))
            boxes = torch.tensor(example.boxes).reshape(-1, 4)
            crowd = torch.tensor(example.ignored, dtype=torch.int64)
            truth.append(
                {"boxes": boxes, "labels": torch.tensor(example.labels).long(), "iscrowd": crowd}
            )
        self.precision.update(found, truth)

    def compute(self) -> dict[str, float]:
        require_batches(self._next)
        found = self.precision.compute()
        result = {
            "ap": float(found["map"]),
            "ap50": float(found["map_50"]),
            "ap75": float(found["map_75"]),
        }
        at_50 = found["precision"][
            0, :, :, 0, -1
        ]  # IoU 0.5, recall, class, all areas, 100 detections
        for place, label in enumerate(found["classes"].reshape(-1).tolist()):
            value = float(at_50[:, place].mean())
            if value >= 0:  # -1: the class is not in the truth
                result[f"ap50@{self.classes[int(label)]}"] = value
        if result["ap"] < 0:
            raise RuntimeError(
                "No image of the split shows any object that counts: average precision is not "
                "defined."
            )
        return result


def best_detections(rows: Tensor, classes: int, scale: Tensor) -> dict[str, Tensor]:
    """The most certain pairs of query and class of one image (Q, classes + 4): boxes in pixels,
    scores, labels.
    """
    scores, place = rows[:, :classes].sigmoid().flatten().sort(descending=True, stable=True)
    scores, place = scores[:MOST], place[:MOST]
    boxes = corners(rows[place // classes, classes:]) * scale
    return {"boxes": boxes, "scores": scores, "labels": place % classes}


def mean_boxes(train: ObjectSplit, classes: int, per_class: int | None = 1) -> Tensor:
    """What knowing the training part alone can say of any image: boxes at the mean place and size
    of each class, with its share of all objects as their score; (boxes, classes + 4), as `update`
    takes detections.

    `per_class` boxes of each class stand at the centers that k-means finds among its boxes (one:
    the mean itself); None takes as many as an image has on the average."""
    from sklearn.cluster import KMeans

    objects = torch.cat(train.objects)
    rows = []
    for label in range(classes):
        own = objects[objects[:, 0] == label, 1:]
        wanted = max(1, round(len(own) / len(train))) if per_class is None else per_class
        if not len(own):
            continue
        found = KMeans(min(wanted, len(own)), n_init=4, random_state=0).fit(own.double().numpy())
        row = torch.full((len(found.cluster_centers_), classes + 4), -1e4)
        row[:, label] = torch.tensor(len(own) / len(objects)).logit(eps=1e-6)
        row[:, classes:] = torch.from_numpy(found.cluster_centers_).float()
        rows.append(row)
    return torch.cat(rows)


def constant_precision(rows: Tensor, split: ObjectSplit, classes: list[str]) -> dict[str, float]:
    """The metrics of the same detections on every image of a split."""
    metrics = ObjectMetrics(split, classes)
    metrics.update(rows.expand(len(split), -1, -1), torch.empty(0), index=torch.arange(len(split)))
    return metrics.compute()
