"""Every reader of a data set, whole, with one of its files harmed.

The sets are those of the tests, with fewer and shorter entries where these would take the time: a reader takes every
format apart in the same way however many files of it there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.reliability.fuzz import harmed
from benchmarks.reliability.subject import Tally, patience
from tests.reproductions.data import writers
from tests.reproductions.data.readers import READERS, files, packed, read


def _cifar100(folder: Path, write: Callable[..., Path]) -> Path:
    train, test = (writers.cifar_rows(6, 100, seed, coarse=True) for seed in (0, 1))
    return write(folder, train, test)


def _fsdd(folder: Path) -> Path:
    writers.fsdd(folder, range(4, 7), 1)
    for path in files(folder):
        if path.name[0] > "1":
            path.unlink()
    return folder


def _jpegs(folder: Path) -> Path:
    READERS["folder of jpg"][1](folder)
    for path in files(folder):
        if path.stem > "2":
            path.unlink()
    return folder


def _gtzan_audio(folder: Path) -> Path:
    for genre in writers.GENRES[:2]:
        for i in range(3):
            writers.au(
                folder / genre / f"{genre}.{i:05d}.au", writers.tone(200 + 40 * i, 0.12, 22050)
            )
    for i, part in enumerate(("train", "valid", "test")):
        (folder / f"{part}_filtered.txt").write_text(
            "".join(f"{g}/{g}.{i:05d}.au\n" for g in writers.GENRES[:2])
        )
    return folder


BATCH = 100
"""Inputs to a reader before it is the turn of the next."""
SMALLER: dict[str, Callable[[Path], Path]] = {
    "cifar10 binary": lambda f: writers.cifar10_binary(
        f / "cifar-10-batches-bin", writers.cifar10_parts(2)
    ),
    "cifar10 python": lambda f: writers.cifar10_python(
        f / "cifar-10-batches-py", writers.cifar10_parts(2)
    ),
    "cifar10 mosaic": lambda f: writers.cifar10_mosaic(f / "package", writers.cifar10_parts(2)),
    "cifar10 tar.gz": lambda f: packed(f, "gz", 2),
    "cifar10 tar.xz": lambda f: packed(f, "xz", 2),
    "cifar10 tar.bz2": lambda f: packed(f, "bz2", 2),
    "cifar100 binary": lambda f: _cifar100(f, writers.cifar100_binary),
    "cifar100 python": lambda f: _cifar100(f, writers.cifar100_python),
    "folder of png": lambda f: writers.image_folder(f, n=3),
    "folder of jpg": _jpegs,
    "fsdd": _fsdd,
    "gtzan mel": lambda f: writers.gtzan_mel(f, frames=12),
    "gtzan audio": _gtzan_audio,
    "voc": lambda f: writers.voc(f, 2),
    "coco": lambda f: writers.coco(f, 2),
}


def attack(count: int, where: Path, rng: random.Random) -> Tally:
    """`count` harmed files for each reader: read, or refused as damaged with the file's name."""
    from dampen.studies.data.dataset import DamagedData, IncompleteData, MissingData

    tally = Tally()
    sets: dict[str, tuple[Path, dict[Path, bytes]]] = {}
    for i, (case, (_, write)) in enumerate(READERS.items()):
        folder = where / f"reader-{i}"
        folder.mkdir()
        SMALLER.get(case, write)(folder)
        read(case, folder)  # whole, it is read
        sets[case] = folder, {path: path.read_bytes() for path in files(folder)}
    for turn in patience.turns(
        -(-count // BATCH)
    ):  # by turns: whoever ends this early has as many for each reader
        for case, (folder, contents) in sets.items():
            for _ in range(min(BATCH, count - turn * BATCH)):
                path = rng.choice(list(contents))
                path.write_bytes(harmed(contents[path], rng))
                try:
                    read(case, folder)
                except (DamagedData, IncompleteData, MissingData):
                    tally["refused in words"] += 1
                except Exception as error:
                    tally["tracebacks"] += 1
                    print(case, path.name, repr(error)[:300], flush=True)
                path.write_bytes(contents[path])
                tally["repetitions"] += 1
    tally["inputs to each"] = tally["repetitions"] // len(sets)
    return tally
