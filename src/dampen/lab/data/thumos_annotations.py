"""Read the annotations of THUMOS14: which actions each video shows, from when to when."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.lab.data.errors import DamagedData
from dampen.lab.data.files import file_sha256

ANNOTATION_FILES = ("annotations.json", "thumos14.json", "thumos_14_anno.json")
SUBSETS = dict.fromkeys(("train", "training", "validation", "val"), "train") | {"test": "test", "testing": "test"}
AMBIGUOUS = "ambiguous"


@dataclass(frozen=True)
class Video:
    """One annotated video; actions are (class, start, end) in seconds."""

    name: str
    subset: str
    duration: float
    actions: list[tuple[int, float, float]]
    ambiguous: list[tuple[float, float]]


@dataclass(frozen=True)
class Annotations:
    classes: list[str]
    rate: float
    videos: dict[str, Video]
    sha256: str


def read_annotations(root: Path, rate: float | None) -> Annotations:
    """Annotations as `{"annotations": {video: ...}}` or, in ActivityNet's form, `{"database": {video: ...}}`.

    Segments labeled 'Ambiguous' belong to no class; their frames do not count.
    """
    path = next(root / name for name in ANNOTATION_FILES if (root / name).is_file())
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedData(
            f"{path} ({path.stat().st_size} bytes) is not JSON: {error}. Fetch the file again."
        ) from error
    entries = (table.get("annotations") or table.get("database")) if isinstance(table, dict) else None
    if not isinstance(entries, dict):
        raise DamagedData(f"{path} has neither 'annotations' nor 'database' with one entry per video.")
    rate = rate or table.get("feature_rate_hz")
    if not isinstance(rate, int | float) or not rate > 0:
        raise DamagedData(f"{path} does not say 'feature_rate_hz': say rate= (features per second), e.g. 25/16.")
    try:
        seen = {note["label"] for entry in entries.values() for note in entry["annotations"]}
        names = table.get("classes") or sorted(name for name in seen if name.lower() != AMBIGUOUS)
        numbers = {name: number for number, name in enumerate(names)}
        videos = {name: _video(name, entry, numbers) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedData(f"{path} breaks the form of annotations: {error!r}.") from error
    return Annotations(list(names), float(rate), videos, file_sha256(path))


def _video(name: str, entry: dict[str, Any], numbers: dict[str, int]) -> Video:
    actions, ambiguous = [], []
    for note in entry["annotations"]:
        start, end = (float(second) for second in note["segment"])
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ValueError(f"segment {note['segment']} of {name}")
        if note["label"].lower() == AMBIGUOUS:
            ambiguous.append((start, end))
        else:
            actions.append((numbers[note["label"]], start, end))
    return Video(name, SUBSETS[entry["subset"].lower()], float(entry["duration"]), actions, ambiguous)
