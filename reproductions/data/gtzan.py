"""GTZAN: 1,000 clips of 30 seconds in 10 genres, as audio or as log-mel spectrograms computed
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dampen.studies.plugins import (
    DamagedData,
    Dataset,
    DataSource,
    DataSpec,
    Request,
    damaged,
    draw_name,
    file_sha256,
    find,
    joint_sha256,
    limited,
    read_file,
    read_npz,
    require_complete,
    stratified,
    train_and_valid,
)
from reproductions.data.mel import LogMel, resample, stack_frames, summarize_frames
from reproductions.data.sequences import clip_dataset
from reproductions.data.waves import read_audio

GENRES = [
    "blues",
    "classical",
    "country",
    "disco",
    "hiphop",
    "jazz",
    "metal",
    "pop",
    "reggae",
    "rock",
]
GTZAN = DataSpec(
    "gtzan",
    "audio",
    "GTZAN genres: 1,000 clips of 30 s in 10 genres (audio, or 64 log-mel bands)",
    "the 'GTZAN Genre Collection' of G. Tzanetakis (MARSYAS), genres.tar.gz; for the "
    "fault-filtered split put "
    "train_filtered.txt, valid_filtered.txt and test_filtered.txt (Kereliuk, Sturm and Larsen "
    "2015) beside the genres",
    "mel64.npz (mel, label, split, name, classes); or genres/GENRE/GENRE.NNNNN.au or .wav",
)
CANDIDATES = [
    "gtzan",
    "genres",
    "genres_original",
    "gtzan/genres",
    "gtzan/genres_original",
    "Data/genres_original",
]
OFFICIAL_COUNT = 1000
PARTS = ("train", "valid", "test")
TOKENS = {"statistics": summarize_frames, "stack": stack_frames}


@dataclass
class Clips:
    """Decibels (n, frames, bands) with lengths, genre, name and part (train, valid, test, none or
    '') of each.
    """

    mel: list[torch.Tensor]
    labels: np.ndarray
    names: list[str]
    parts: list[str]
    classes: list[str]
    problems: list[str]
    sha256: str
    layout: str


def holds(path: Path) -> bool:
    return (path / "mel64.npz").is_file() or path.name == "mel64.npz" or bool(audio_files(path))


def audio_files(path: Path) -> list[Path]:
    """Audio in genre folders, sorted."""
    found = (
        p
        for genre in GENRES
        for p in (path / genre).glob("*")
        if p.suffix.lower() in (".wav", ".au")
    )
    return sorted(found) if path.is_dir() else []


def load_gtzan(
    ask: Request,
    *,
    stack: int = 5,
    tokens: str = "statistics",
    frames: int = 645,
    test_fraction: float = 0.25,
) -> Dataset:
    """Log-mel tokens, `stack` frames of 46 ms each: by default 129 tokens, near the paper's 120.

    `tokens="statistics"` gives the mean and the standard deviation of each band over those frames,
    a texture window; `"stack"` gives the frames themselves, one after the other. The fault-filtered
    split is used where it is present; clips in no part of it are left out. Otherwise a fixed
    quarter is the test part, and train and validation are drawn by genre."""
    if tokens not in TOKENS:
        raise ValueError(f"tokens must be one of {', '.join(TOKENS)}: got {tokens!r}.")
    root = find(ask.spec, ask.data_dir, CANDIDATES, holds)
    clips = read_clips(root, partial=ask.partial)
    departures = require_complete(clips.problems, ask.partial, ask.spec.name)
    labels = torch.from_numpy(clips.labels.astype(np.int64))
    if set(PARTS) <= set(clips.parts):
        rows = {
            p: torch.tensor([i for i, part in enumerate(clips.parts) if part == p]) for p in PARTS
        }
        kept, cut = limited(labels[rows["train"]].numpy(), ask.limit, ask.seed)
        rows["train"] = rows["train"][kept]
        split, drawn = "official (fault-filtered)", []
    else:
        test, pool = stratified(labels, test_fraction, ask.test_seed)
        train, valid, cut = train_and_valid(labels[pool], ask.train_fraction, ask.seed, ask.limit)
        rows = {"train": pool[train], "valid": pool[valid], "test": test}
        split, drawn = "drawn by genre", ["valid", "test"]
        how = f"{draw_name(ask.test_seed)} by genre of {len(test)} clips"
        departures.append(f"no official split found: {how} serves as test")
    info = {
        "layout": clips.layout,
        "source": root.name,
        "sha256": {"files": clips.sha256},
        "split": split,
        "left_out": sum(part == "none" for part in clips.parts),
        "partial": bool(clips.problems),
        "departures": departures + cut,
        "drawn": drawn,
        "seed": ask.seed,
        "test_seed": ask.test_seed,
        "train_fraction": ask.train_fraction,
        "limit": ask.limit,
        "options": {"stack": stack, "tokens": tokens, "frames": frames},
    }
    sequences = [TOKENS[tokens](clip[:frames], stack) for clip in clips.mel]
    window = -(-frames // stack)
    bands = clips.mel[0].shape[1]
    return clip_dataset(
        ask.spec,
        sequences,
        labels,
        rows,
        clips.classes,
        window,
        info,
        extras={"bands": bands},
        root=root,
    )


def read_clips(root: Path, *, partial: bool) -> Clips:
    """All clips at a path, from mel64.npz or from audio; with `partial`, unreadable audio counts as
    missing.
    """
    file = root if root.name == "mel64.npz" else root / "mel64.npz"
    return _precomputed(file) if file.is_file() else _audio(root, partial)


def precompute(
    root: str | Path, destination: str | Path | None = None, *, partial: bool = False
) -> Path:
    """Write mel64.npz for a folder of audio, so that later loads take a second, not a minute."""
    root = Path(root)
    clips = _audio(root, partial)
    require_complete(clips.problems, partial, GTZAN.name)
    frames = min(len(clip) for clip in clips.mel)
    path = Path(destination) if destination else root / "mel64.npz"
    np.savez(
        path,
        mel=np.stack([clip[:frames].T.numpy() for clip in clips.mel]),
        label=clips.labels,
        split=np.array(clips.parts),
        name=np.array(clips.names),
        classes=np.array(clips.classes),
    )
    return path


def _precomputed(file: Path) -> Clips:
    table = read_npz(file, {"mel": "f", "label": "iu", "split": "U", "name": "U", "classes": "U"})
    mel, label, split, name, classes = table.values()
    if (
        mel.ndim != 3
        or not mel.size
        or not label.shape == split.shape == name.shape == mel.shape[:1]
    ):
        raise damaged(
            file,
            "as mel, label, split, name",
            (mel.shape, label.shape, split.shape, name.shape),
            "n of each",
        )
    if (
        classes.ndim != 1
        or label.min() < 0
        or label.max() >= len(classes)
        or not np.isfinite(mel).all()
    ):
        raise damaged(
            file,
            "as values",
            "labels or decibels out of range",
            "labels of the classes, finite decibels",
        )
    problems = [] if len(mel) == OFFICIAL_COUNT else [f"{len(mel)} of {OFFICIAL_COUNT} clips"]
    spectra = [torch.from_numpy(clip.T.astype(np.float32)) for clip in mel]
    parts, names = [str(s) for s in split], [str(n) for n in name]
    return Clips(
        spectra,
        label,
        names,
        parts,
        classes.tolist(),
        problems,
        file_sha256(file),
        "precomputed mel",
    )


def _audio(root: Path, partial: bool) -> Clips:
    """Every clip through the front end: 22,050 Hz, frames of 2048 every 1024 samples, 64 bands."""
    front = LogMel(rate=22_050, fft=2048, hop=1024, bands=64)
    assigned = _filtered_split(root)
    mel, labels, names, parts, hashes, problems = [], [], [], [], {}, []
    for path in audio_files(root):
        try:
            wave, rate = read_audio(path)
        except DamagedData as error:
            if not partial:
                raise
            problems.append(str(error))
            continue
        mel.append(front(torch.from_numpy(resample(wave, rate, front.rate))))
        labels.append(GENRES.index(path.parent.name))
        names.append(path.stem)
        parts.append(assigned.get(path.stem, "none") if assigned else "")
        hashes[f"{path.parent.name}/{path.name}"] = file_sha256(path)
    if not mel:
        raise DamagedData(f"{root} holds no clip that can be read: {'; '.join(problems)}.")
    if len(mel) != OFFICIAL_COUNT:
        problems.append(f"{len(mel)} of {OFFICIAL_COUNT} clips")
    return Clips(
        mel, np.array(labels), names, parts, GENRES, problems, joint_sha256(hashes), "audio folder"
    )


def _filtered_split(root: Path) -> dict[str, str]:
    """Clip name to part from train_filtered.txt and its siblings, beside the genres or one folder
    up.
    """
    for folder in (root, root.parent):
        files = {part: folder / f"{part}_filtered.txt" for part in PARTS}
        if all(file.is_file() for file in files.values()):
            return {
                Path(line).stem: part for part, file in files.items() for line in _clip_names(file)
            }
    return {}


def _clip_names(file: Path) -> list[str]:
    try:
        return read_file(file).decode("utf-8").split()
    except UnicodeDecodeError as error:
        raise DamagedData(f"{file} cannot be read as UTF-8: {error}.") from error


GTZAN_SOURCE = DataSource(
    GTZAN,
    load_gtzan,
    holds,
    CANDIDATES,
    steps=(
        "get genres.tar.gz, the GTZAN Genre Collection (MARSYAS, G. Tzanetakis), and unpack it: "
        "genres/GENRE/*.au",
        "optional: put train_filtered.txt, valid_filtered.txt and test_filtered.txt "
        "(fault-filtered split) beside it",
    ),
    preset={
        "model": {"name": "encoder", "width": 96, "depth": 2, "heads": 4, "mlp": 192},
        "train": {"epochs": 40, "batch_size": 16, "lr": 1e-3, "warmup": 2.0},
    },
)
