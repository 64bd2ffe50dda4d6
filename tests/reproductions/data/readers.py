"""Every reader with a tiny set in its format, for tests that go through all of them. All content is synthetic."""

import gzip
import io
import tarfile
from pathlib import Path

from PIL import Image

from dampen.studies.data import load
from tests.reproductions.data import writers


def _mosaic(folder: Path) -> Path:
    return writers.cifar10_mosaic(folder / "package", writers.cifar10_parts())


def packed(folder: Path, kind: str, n: int = 20) -> Path:
    """CIFAR-10 as an archive, `n` images in each of its six parts."""
    source = writers.cifar10_binary(folder / "x", writers.cifar10_parts(n))
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, f"w:{kind}") as tar:
        for file in sorted(source.iterdir()):
            tar.add(file, f"cifar-10-batches-bin/{file.name}")
            file.unlink()
    source.rmdir()
    return path


def _cifar100(folder: Path, write) -> Path:
    train, test = (writers.cifar_rows(200, 100, seed, coarse=True) for seed in (0, 1))
    return write(folder, train, test)


def _gtzan_audio(folder: Path) -> Path:
    for genre in writers.GENRES:
        for i in range(4):
            writers.au(
                folder / genre / f"{genre}.{i:05d}.au", writers.tone(200 + 40 * i, 0.7, 22050)
            )
    return folder


def _jpegs(folder: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(8):
            buffer = io.BytesIO()
            Image.new("RGB", (40 + i, 40), (200 * label, 10 * i, 30)).save(buffer, "JPEG")
            (folder / name / f"{i}.jpg").write_bytes(buffer.getvalue())
    return folder


READERS = {
    "cifar10 binary": (
        "cifar10",
        lambda f: writers.cifar10_binary(f / "cifar-10-batches-bin", writers.cifar10_parts()),
    ),
    "cifar10 python": (
        "cifar10",
        lambda f: writers.cifar10_python(f / "cifar-10-batches-py", writers.cifar10_parts()),
    ),
    "cifar10 mosaic": ("cifar10", _mosaic),
    "cifar10 tar.gz": ("cifar10", lambda f: packed(f, "gz")),
    "cifar10 tar.xz": ("cifar10", lambda f: packed(f, "xz")),
    "cifar10 tar.bz2": ("cifar10", lambda f: packed(f, "bz2")),
    "cifar100 binary": ("cifar100", lambda f: _cifar100(f, writers.cifar100_binary)),
    "cifar100 python": ("cifar100", lambda f: _cifar100(f, writers.cifar100_python)),
    "folder of png": ("folder", lambda f: writers.image_folder(f)),
    "folder of jpg": ("folder", lambda f: _jpegs(f)),
    "fsdd": ("fsdd", writers.fsdd),
    "gtzan mel": ("gtzan", writers.gtzan_mel),
    "gtzan audio": ("gtzan", _gtzan_audio),
    "thumos14": ("thumos14", writers.thumos),
    "voc": ("voc", writers.voc),
    "coco": ("coco", writers.coco),
    "parallel": ("parallel", writers.parallel),
    "parallel gz": ("parallel", lambda f: writers.parallel(f, compressed=True)),
    "text": ("text", writers.text),
    "table of csv": ("table", lambda f: writers.table(f / "train.csv")),
    "table of jsonl": ("table", lambda f: writers.table(f / "train.jsonl")),
    "image arrays": ("image_arrays", lambda f: writers.arrays(f / "own.npz", images=True)),
    "feature arrays": ("feature_arrays", lambda f: writers.arrays(f / "own.npz", images=False)),
}
"""Name of the case -> (data set, what writes it into a folder)."""
OPTIONS = {
    "parallel": {"vocabulary": 270},
    "text": {"context": 32},
    "voc": {"size": [16, 24]},
    "coco": {"size": [16, 24]},
}


def read(case: str, folder: Path):
    name = READERS[case][0]
    place = (
        folder / "own.npz" if name.endswith("arrays") else folder
    )  # that reader takes a file, the others folders
    return load(name, place, partial=True, **OPTIONS.get(name, {}))


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def recompressed(content: bytes) -> bytes:
    return gzip.compress(content)
