"""Where a user's own model and data are: what a trial needs beside its plain data, which has no paths."""

from __future__ import annotations

from dataclasses import dataclass

from dampen.studies.trainer.function import Function


@dataclass(frozen=True)
class Parts:
    """Places and functions of the user's own parts; None where the lab's own are used."""

    data: str | None = None  # a file or folder
    read: Function | None = None  # a function that returns data sets
    model: str | None = None  # a folder of a saved Hugging Face model
    build: Function | None = None  # a function that returns a model
