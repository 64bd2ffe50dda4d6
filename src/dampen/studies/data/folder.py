"""Any folder of images, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import Dataset, DataSpec, Request
from dampen.studies.data.errors import DamagedData
from dampen.studies.data.files import file_sha256, find, joint_sha256
from dampen.studies.data.images import Labeled, image_dataset
from dampen.studies.data.limits import read_file, read_image

FOLDER = DataSpec(
    "folder",
    "image",
    "any folder of images, one folder per class, resized to one size",
    "your own images",
    "CLASS/*.png|jpg|jpeg|bmp|gif|webp; or train/CLASS/..., and test/CLASS/... and valid/CLASS/... where they exist",
)
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
VALID_NAMES = ("valid", "val", "validation")


def load_folder(
    ask: Request,
    *,
    size: int = 32,
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images by class folder. The shorter side is resized to `size`, then the middle is cut out.

    Folders `train`, `test` and `valid` are taken as official parts where they exist; what is missing is drawn by class.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (gray) or 3 (RGB): got {channels}.")
    if size < 1:
        raise ValueError(f"size is the side of the images in pixels: got {size}.")
    root = find(ask.spec, ask.data_dir, [], holds)
    train_root = _part(root, "train") or root
    classes = class_folders(train_root)
    hashes: dict[str, str] = {}
    images, labels = _read(root, train_root, classes, size, channels, hashes)
    test_root, valid_root = _part(root, "test"), _part(root, *VALID_NAMES)
    test = _read(root, test_root, classes, size, channels, hashes) if test_root else None
    valid: Labeled | None = _read(root, valid_root, classes, size, channels, hashes) if valid_root else None
    return image_dataset(
        ask.spec,
        images,
        labels,
        classes,
        {
            "layout": "image folder",
            "source": root.name,
            "sha256": {"files": joint_sha256(hashes)},
            "files": len(hashes),
        },
        test=test,
        valid=valid,
        **ask.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "test_fraction": test_fraction},
        root=root,
    )


def holds(path: Path) -> bool:
    return bool(class_folders(_part(path, "train") or path))


def class_folders(root: Path) -> list[str]:
    """Names of the folders that hold at least one image, sorted: they are the classes."""
    if not root.is_dir():
        return []
    return sorted(p.name for p in root.iterdir() if p.is_dir() and any(_is_image(f) for f in p.iterdir()))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _part(root: Path, *names: str) -> Path | None:
    """The first of the named sub-folders that is a part: a folder of class folders."""
    return next((root / name for name in names if class_folders(root / name)), None)


def _read(root: Path, part: Path, classes: list[str], size: int, channels: int, hashes: dict[str, str]) -> Labeled:
    unknown = sorted(set(class_folders(part)) - set(classes))
    if unknown:
        raise DamagedData(f"{part} has classes that the training part lacks: {unknown}; it has {classes}.")
    images: list[Tensor] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = part / name
        for path in sorted(p for p in folder.iterdir() if _is_image(p)) if folder.is_dir() else []:
            images.append(_image(path, size, channels))
            labels.append(label)
            hashes[path.relative_to(root).as_posix()] = file_sha256(path)
    if not images:
        raise DamagedData(f"{part} holds no image of the classes {classes}.")
    return torch.stack(images), torch.tensor(labels)


def _image(path: Path, size: int, channels: int) -> Tensor:
    return fitted(read_image(path, read_file(path), FORMATS, "RGB" if channels == 3 else "L"), size, channels)


def fitted(picture: Any, size: int, channels: int) -> Tensor:
    """A PIL picture as bytes (channels, size, size): the shorter side resized, then the middle cut out."""
    from PIL import Image, ImageOps

    cut = ImageOps.fit(picture.convert("RGB" if channels == 3 else "L"), (size, size), Image.Resampling.BILINEAR)
    pixels = np.array(cut, dtype=np.uint8).reshape(size, size, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
