"""Read the annotations of THUMOS14: which actions each video shows, from when to when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.studies.plugins import DamagedData, file_sha256, read_file
from reproductions.data.archives import parse_json

ANNOTATION_FILES = ("annotations.json", "thumos14.json", "thumos_14_anno.json")
SUBSETS = dict.fromkeys(("train", "training", "validation", "val"), "train") | {
    "test": "test",
    "testing": "test",
}
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
    """Annotations as `{"annotations": {video: ...}}` or, in ActivityNet's form, `{"database":
    {video: ...}}`.

    Segments labeled 'Ambiguous' belong to no class; their frames do not count.
    """
    path = next(root / name for name in ANNOTATION_FILES if (root / name).is_file())
    table = parse_json(read_file(path), path)
    entries = (
        (table.get("annotations") or table.get("database")) if isinstance(table, dict) else None
    )
    if not isinstance(entries, dict):
        raise DamagedData(
            f"{path} has neither 'annotations' nor 'database' with one entry per video."
        )
    rate = rate or table.get("feature_rate_hz")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < 1e6:
        raise DamagedData(
            f"{path} does not say 'feature_rate_hz': say rate= (features per second), e.g. 25/16."
        )
    try:
        seen = {note["label"] for entry in entries.values() for note in entry["annotations"]}
        names = table.get("classes") or sorted(name for name in seen if name.lower() != AMBIGUOUS)
        if (
            not isinstance(names, list)
            or not all(isinstance(n, str) for n in names)
            or len(set(names)) != len(names)
        ):
            raise ValueError("classes is not a list of different names")
        numbers = {name: number for number, name in enumerate(names)}
        videos = {name: _video(name, entry, numbers) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedData(f"{path} breaks the form of annotations: {error!r}.") from error
    return Annotations(list(names), float(rate), videos, file_sha256(path))


def _video(name: str, entry: dict[str, Any], numbers: dict[str, int]) -> Video:
    actions, ambiguous, duration = [], [], float(entry["duration"])
    if (
        not 0 <= duration < math.inf or name != Path(name).name
    ):  # a name is that of a file beside the others
        raise ValueError(f"video {name!r} of {duration} seconds")
    for note in entry["annotations"]:
        start, end = (float(second) for second in note["segment"])
        if not 0 <= start <= end < math.inf:
            raise ValueError(
                f"segment {note['segment']} of {name}: expected 0 <= start <= end in seconds"
            )
        if note["label"].lower() == AMBIGUOUS:
            ambiguous.append((start, end))
        else:
            actions.append((numbers[note["label"]], start, end))
    return Video(name, SUBSETS[entry["subset"].lower()], duration, actions, ambiguous)
