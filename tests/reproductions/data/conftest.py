"""Real data for the tests where it is at hand, else tiny synthetic sets in the official formats."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.reproductions.data import writers

REAL = os.environ.get("DAMPEN_TEST_DATA")
"""A folder with the sets in the layouts of their official readers; `make test-data` sets it where they are at hand."""


class Found(NamedTuple):
    """Where a set lies, and whether it is the real one."""

    path: Path
    real: bool


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function from a set's name to where it lies.

    Real data come from the folder that DAMPEN_TEST_DATA names. Without it a small SYNTHETIC set in the official format
    stands in: `real` is then False, and a line printed says so.
    """
    root = tmp_path_factory.mktemp("data")
    found: dict[str, Found] = {}

    def get(name: str) -> Found:
        if name not in found:
            found[name] = Found(Path(REAL), True) if REAL else Found(_write(name, root), False)
        return found[name]

    return get


def _write(name: str, root: Path) -> Path:
    print(
        f"DAMPEN_TEST_DATA is not set: a small synthetic set in the official format stands in for {name}"
    )
    rows = {
        split: writers.cifar_rows(200, 100, seed, coarse=True)
        for seed, split in enumerate(("train", "test"))
    }
    write = {
        "cifar10": lambda path: writers.cifar10_binary(
            path / "cifar-10-batches-bin", writers.cifar10_parts(60)
        ),
        "cifar100": lambda path: writers.cifar100_binary(
            path / "cifar-100-binary", rows["train"], rows["test"]
        ),
        "thumos14": lambda path: writers.thumos(path / "thumos14"),
        "bccd": lambda path: writers.voc(path / "bccd" / "BCCD"),
        "gtzan": lambda path: writers.gtzan_mel(path / "gtzan"),
        "fsdd": lambda path: writers.fsdd(path / "fsdd"),
        "multi30k": lambda path: writers.parallel(path / "multi30k"),
        "tinyshakespeare": lambda path: writers.text(path / "tinyshakespeare"),
    }
    write[name](root / name)
    return root / name
