"""THUMOS14, temporal action detection on feature files: 64-token windows with the classes present
at each frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dampen.studies.plugins import (
    DamagedData,
    Dataset,
    DataSource,
    DataSpec,
    Request,
    damaged,
    file_sha256,
    find,
    joint_sha256,
    parse_npy,
    read_file,
    require_complete,
    train_and_valid,
)
from reproductions.data.sequences import SequenceSplit, feature_statistics
from reproductions.data.thumos_annotations import (
    ANNOTATION_FILES,
    Annotations,
    Video,
    read_annotations,
)

THUMOS14 = DataSpec(
    "thumos14",
    "detection",
    "THUMOS14: 20 sports actions in untrimmed video, 200 validation (= training) and 212 test "
    "videos, as features",
    "the page 'THUMOS Challenge 2014' for the videos and annotations; extract features (TSN, I3D) "
    "with a public "
    "extractor, or take those published with LSTR, OadTR or ActionFormer",
    "thumos14/features/VIDEO.npy (frames x features) and annotations.json (or thumos14.json in "
    "ActivityNet's form)",
)
CANDIDATES = ["thumos14", "THUMOS14", "thumos"]
OFFICIAL_COUNTS = {"train": 200, "test": 212}


@dataclass(frozen=True)
class Timeline:
    """One video of a split: its rows in the frame tensor and its actions as (class, start, end) in
    seconds.
    """

    name: str
    first: int
    frames: int
    rate: float
    actions: list[tuple[int, float, float]]


class DetectionSplit(SequenceSplit):
    """Windows of video features that remember which video they come from, so that intervals can be
    evaluated.
    """

    timelines: list[Timeline]


def holds(path: Path) -> bool:
    return (path / "features").is_dir() and any(
        (path / name).is_file() for name in ANNOTATION_FILES
    )


def load_thumos(
    ask: Request,
    *,
    window: int = 64,
    stride: int = 32,
    labels: str = "background",
    rate: float | None = None,
) -> Dataset:
    """Feature windows with per-frame labels; train and validation are drawn per video, by main
    class.

    `labels="background"` adds a class 0 for frames without action and shares a frame with several
    actions equally among them (softmax, as in online action detection); `"multi"` gives each class
    its own yes or no (sigmoid). Training windows start every `stride` frames; validation and test
    windows do not overlap, so each frame is predicted once. `rate` (features per second) is needed
    where the annotations do not say it. `limit` counts videos."""
    if labels not in ("background", "multi"):
        raise ValueError(
            f"labels must be 'background' (softmax) or 'multi' (sigmoid): got {labels!r}."
        )
    if not 1 <= stride <= window:
        raise ValueError(
            f"Windows must cover every frame: need 1 <= stride <= window, got {stride} and "
            f"{window}."
        )
    root = find(ask.spec, ask.data_dir, CANDIDATES, holds)
    notes = read_annotations(root, rate)
    present = {
        name: video for name, video in notes.videos.items() if feature_file(root, name).is_file()
    }
    problems = missing_videos(notes, present)
    departures = require_complete(problems, ask.partial, ask.spec.name)
    pool = [video for video in present.values() if video.subset == "train"]
    test = [video for video in present.values() if video.subset == "test"]
    if not pool or not test:
        raise DamagedData(
            f"{root} has features of {len(pool)} training and {len(test)} test videos: need both."
        )
    strata = np.array([_main_class(video) for video in pool])
    train_rows, valid_rows, cut = train_and_valid(strata, ask.train_fraction, ask.seed, ask.limit)

    frames, first = _read_features(root, [*pool, *test])
    target, counted = _targets([*pool, *test], frames, first, notes, labels)
    parts = {
        "train": [pool[i] for i in train_rows],
        "valid": [pool[i] for i in valid_rows],
        "test": test,
    }
    own = torch.cat([torch.arange(first[v.name][0], sum(first[v.name])) for v in parts["train"]])
    normalization = feature_statistics(frames[own], one_scale=True)
    splits = {}
    for part, videos in parts.items():
        starts, lengths = _windows(
            [first[v.name] for v in videos], window, stride if part == "train" else window
        )
        split = DetectionSplit(
            frames, starts, lengths, target, window, normalization, per_token=True, counted=counted
        )
        split.timelines = [Timeline(v.name, *first[v.name], notes.rate, v.actions) for v in videos]
        splits[part] = split
    classes = notes.classes if labels == "multi" else ["Background", *notes.classes]
    hashes = {f"{v.name}.npy": file_sha256(feature_file(root, v.name)) for v in (*pool, *test)}
    info = {
        "layout": "feature files",
        "source": root.name,
        "sha256": {"features": joint_sha256(hashes), "annotations": notes.sha256},
        "videos": {part: len(videos) for part, videos in parts.items()},
        "frames": len(frames),
        "rate": notes.rate,
        "partial": bool(problems),
        "departures": departures + [note.replace("examples", "videos") for note in cut],
        "drawn": ["valid"],
        "seed": ask.seed,
        "train_fraction": ask.train_fraction,
        "limit": ask.limit,
        "options": {"window": window, "stride": stride, "labels": labels},
    }
    return Dataset(
        ask.spec.name,
        ask.spec.task,
        splits["train"],
        splits["valid"],
        splits["test"],
        classes,
        info,
        {
            "features": frames.shape[1],
            "classes": len(classes),
            "max_tokens": window,
            "per_token": True,
        },
        loss="cross_entropy" if labels == "background" else "binary_cross_entropy",
        normalization=normalization,
        root=root,
        extras={"background": labels == "background"},
    )


def feature_file(root: Path, name: str) -> Path:
    return root / "features" / f"{name}.npy"


def missing_videos(notes: Annotations, present: dict[str, Video]) -> list[str]:
    """What an incomplete copy lacks: videos without features, or too few annotated ones."""
    problems = []
    for subset, official in OFFICIAL_COUNTS.items():
        annotated = [name for name, video in notes.videos.items() if video.subset == subset]
        absent = [name for name in annotated if name not in present]
        if absent:
            some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            problems.append(
                f"{len(absent)} of {len(annotated)} {subset} videos have no feature file ({some})"
            )
        if len(annotated) < official:
            problems.append(f"{len(annotated)} of {official} {subset} videos are annotated")
    return problems


def frame_labels(frames: int, rate: float, video: Video, classes: int) -> tuple[Tensor, Tensor]:
    """Which classes each frame shows, (frames, classes) of 0 and 1, and which frames count (not
    ambiguous).

    Frame i stands at (i + 0.5) / rate seconds. An action too short to contain any frame marks the
    one nearest to its middle, so that none vanishes."""
    center = (torch.arange(frames) + 0.5) / rate
    shown = torch.zeros(frames, classes)
    for label, start, end in video.actions:
        inside = (center >= start) & (center <= end)
        nearest = int((start + end) / 2 * rate)
        if not inside.any() and nearest < frames:
            inside[nearest] = True
        shown[inside, label] = 1.0
    counted = torch.ones(frames, dtype=torch.bool)
    for start, end in video.ambiguous:
        counted &= ~((center >= start) & (center <= end))
    return shown, counted | shown.any(dim=1)


def _main_class(video: Video) -> int:
    """The class a video shows most often, its stratum; -1 for a video without any action."""
    labels = [label for label, _, _ in video.actions]
    return max(sorted(set(labels)), key=labels.count) if labels else -1


def _read_features(root: Path, videos: list[Video]) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """All features as one (frames, features) tensor, and for each video its first row and number of
    rows.
    """
    parts: list[np.ndarray] = []
    rows: dict[str, tuple[int, int]] = {}
    at = 0
    for video in videos:
        path = feature_file(root, video.name)
        features = parse_npy(read_file(path), path)
        width = parts[0].shape[1] if parts else "any number of"
        if features.ndim != 2 or not len(features) or (parts and features.shape[1] != width):
            raise damaged(path, "as shape", features.shape, f"frames x {width} features")
        if not np.isfinite(features).all():
            raise damaged(path, "values", "infinite or undefined", "finite ones")
        rows[video.name] = at, len(features)
        at += len(features)
        parts.append(features.astype(np.float32))
    return torch.from_numpy(np.concatenate(parts)), rows


def _targets(
    videos: list[Video],
    frames: Tensor,
    first: dict[str, tuple[int, int]],
    notes: Annotations,
    labels: str,
) -> tuple[Tensor, Tensor]:
    pairs = [frame_labels(first[v.name][1], notes.rate, v, len(notes.classes)) for v in videos]
    shown, counted = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    if labels == "multi":
        return shown, counted
    total = shown.sum(dim=1, keepdim=True)
    return torch.cat([(total == 0).float(), shown / total.clamp(min=1)], dim=1), counted


def _windows(rows: list[tuple[int, int]], window: int, stride: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of windows that cover every frame of every video; the last of a video may
    be short.
    """
    starts, lengths = [], []
    for first, frames in rows:
        for offset in range(0, max(frames - window, 0) + stride, stride):
            if offset < frames:
                starts.append(first + offset)
                lengths.append(min(window, frames - offset))
    return torch.tensor(starts), torch.tensor(lengths)


THUMOS14_SOURCE = DataSource(
    THUMOS14,
    load_thumos,
    holds,
    CANDIDATES,
    steps=(
        "get the annotations from the page of the THUMOS Challenge 2014, "
        "https://www.crcv.ucf.edu/THUMOS14/",
        "extract features (TSN or I3D) of the 200 validation and 212 test videos into "
        "thumos14/features/VIDEO.npy",
        "write thumos14/annotations.json: classes, feature_rate_hz, annotations by video (subset, "
        "duration, segments)",
    ),
)
