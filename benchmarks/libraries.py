"""The libraries whose models are tried, and what to do where one is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import library_models, tiny_models


@dataclass
class Library:
    """A library whose models are tried."""

    package: str
    module: str
    subjects: Callable[[], Iterator[tuple[str, Any]]]
    first: str = ""  # a model that is built before the processes part, so that each finds everything imported

    def warm(self) -> None:
        """Import what the models of this library share."""
        for name, build in self.subjects():
            if name == self.first:
                build()

    def missing(self) -> str:
        """What to do where the library is not here, or an empty string."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.package} is not installed (pip install --no-deps {self.package})"
        return ""


def subjects(library: str) -> Iterator[tuple[str, Any]]:
    """Every model of a library by name, with a function that builds it."""
    yield from LIBRARIES[library].subjects()


LIBRARIES = {
    "timm": Library("timm", "timm", tiny_models.timm_subjects, "vision_transformer"),
    "transformers": Library(
        "transformers", "transformers", tiny_models.transformers_subjects, "bert"
    ),
    "diffusers": Library(
        "diffusers", "diffusers", tiny_models.diffusers_subjects, "DiTTransformer2DModel"
    ),
    "x-transformers": Library(
        "x-transformers", "x_transformers", library_models.x_transformers_subjects, "decoder_plain"
    ),
    "vit-pytorch": Library(
        "vit-pytorch", "vit_pytorch", library_models.vit_pytorch_subjects, "vit"
    ),
    "open_clip": Library(
        "open_clip_torch", "open_clip", library_models.open_clip_subjects, "clip_vit"
    ),
    "torchtune": Library("torchtune", "torchtune", library_models.torchtune_subjects, "llama2"),
}
