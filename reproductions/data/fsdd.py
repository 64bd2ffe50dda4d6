"""The Free Spoken Digit Dataset: 3,000 recordings of 10 digits by 6 speakers at 8 kHz."""

from __future__ import annotations

import re
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
    file_sha256,
    find,
    joint_sha256,
    require_complete,
    train_and_valid,
)
from reproductions.data.mel import LogMel, resample, stack_frames
from reproductions.data.sequences import clip_dataset
from reproductions.data.waves import read_audio

FSDD = DataSpec(
    "fsdd",
    "audio",
    "Free Spoken Digit Dataset: 3,000 recordings of 10 digits by 6 speakers, 8 kHz",
    "the repository 'free-spoken-digit-dataset' of Jakobovski on GitHub (CC BY-SA 4.0)",
    "recordings/DIGIT_SPEAKER_INDEX.wav",
)
CANDIDATES = ["fsdd", "free-spoken-digit-dataset", "free-spoken-digit-dataset-master"]
NAME = re.compile(r"(\d)_(\w+?)_(\d+)\.wav")
OFFICIAL_COUNT = 3000
RATE = 8000


def recordings(path: Path) -> dict[str, Path]:
    """The recordings at a path (the set's folder or its `recordings`), by file name."""
    folder = path / "recordings" if (path / "recordings").is_dir() else path
    return (
        {p.name: p for p in sorted(folder.glob("*.wav")) if NAME.fullmatch(p.name)}
        if folder.is_dir()
        else {}
    )


def load_fsdd(
    ask: Request,
    *,
    bands: int = 40,
    stack: int = 4,
    seconds: float = 1.28,
) -> Dataset:
    """Log-mel tokens of the recordings: frames of 64 ms every 10 ms, `stack` frames to a token.

    The official test part is every recording with index below 5 (300 of 3,000). Train and
    validation are drawn from the rest, stratified by digit and speaker. Recordings are cut at
    `seconds`, which shortens about 1 in 1,000."""
    root = find(ask.spec, ask.data_dir, CANDIDATES, lambda path: bool(recordings(path)))
    files = recordings(root)
    problems = (
        [] if len(files) == OFFICIAL_COUNT else [f"{len(files)} of {OFFICIAL_COUNT} recordings"]
    )
    departures = require_complete(problems, ask.partial, ask.spec.name)
    parts = [NAME.fullmatch(name) for name in files]
    digits = torch.tensor([int(m[1]) for m in parts if m])
    speakers = sorted({m[2] for m in parts if m})
    speaker = torch.tensor([speakers.index(m[2]) for m in parts if m])
    is_test = torch.tensor([int(m[3]) < 5 for m in parts if m])
    front = LogMel(RATE, fft=512, hop=80, bands=bands)
    window = max(round(seconds * RATE / front.hop / stack), 1)
    clips = [stack_frames(_decibels(path, front), stack) for path in files.values()]

    test, pool = torch.nonzero(is_test).flatten(), torch.nonzero(~is_test).flatten()
    if not len(test) or not len(pool):
        raise DamagedData(
            f"{root} has {len(test)} test recordings (index below 5) and {len(pool)} others: need "
            "both."
        )
    strata = digits[pool] * len(speakers) + speaker[pool]
    train, valid, cut = train_and_valid(strata, ask.train_fraction, ask.seed, ask.limit)
    info = {
        "layout": "wav folder",
        "source": root.name,
        "sha256": {
            "files": joint_sha256({name: file_sha256(path) for name, path in files.items()})
        },
        "files": len(files),
        "speakers": speakers,
        "shortened": sum(len(clip) > window for clip in clips),
        "partial": bool(problems),
        "departures": departures + cut,
        "drawn": ["valid"],
        "seed": ask.seed,
        "train_fraction": ask.train_fraction,
        "limit": ask.limit,
        "options": {"bands": bands, "stack": stack, "seconds": seconds},
    }
    rows = {"train": pool[train], "valid": pool[valid], "test": test}
    classes = [str(d) for d in range(10)]
    return clip_dataset(
        ask.spec, clips, digits, rows, classes, window, info, extras={"bands": bands}, root=root
    )


def _decibels(path: Path, front: LogMel) -> Tensor:
    wave, rate = read_audio(path)
    return front(torch.from_numpy(np.ascontiguousarray(resample(wave, rate, front.rate))))


FSDD_SOURCE = DataSource(
    FSDD,
    load_fsdd,
    lambda path: bool(recordings(path)),
    CANDIDATES,
    steps=("git clone https://github.com/Jakobovski/free-spoken-digit-dataset",),
    preset={
        "model": {"name": "encoder", "width": 96, "depth": 2, "heads": 4, "mlp": 192},
        "train": {"epochs": 10, "batch_size": 32, "lr": 2e-3, "warmup": 1.0},
    },
)
