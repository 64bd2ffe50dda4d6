"""Any folder of images, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import DamagedData, Dataset, DataSpec, Request
from dampen.studies.data.files import file_sha256, find, joint_sha256, read_file, read_image
from dampen.studies.data.images import Labeled, image_dataset

FOLDER = DataSpec(
    "folder",
    "image",
    "any folder of images, one folder per class, resized to one size",
    "your own images",
    "CLASS/*.png|jpg|jpeg|bmp|gif|webp; or train/CLASS/..., and optionally test/CLASS/... and "
    "valid/CLASS/...",
)
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
VALID_NAMES = ("valid", "val", "validation")


def load_folder(
    request: Request,
    *,
    size: int = 32,
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images by class folder. The shorter side is resized to `size`, then the middle is cut out.

    Folders `train`, `test` and `valid` are used as splits where they exist. The other splits are
    drawn by class.

    Args:
        request: which folder and which draw.
        size: the side of the images in pixels.
        channels: 1 (gray) or 3 (RGB).
        test_fraction: the share to test on where there is no folder `test`.
        test_limit: how many test examples are kept.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (gray) or 3 (RGB): got {channels}.")
    if size < 1:
        raise ValueError(f"size is the side of the images in pixels: got {size}.")
    root = find(request.spec, request.data_dir, [], holds)
    train = _split(root, "train") or root
    folders = {
        "train": train,
        "valid": _split(root, *VALID_NAMES),
        "test": _split(root, "test"),
    }
    classes = class_folders(train)
    hashes: dict[str, str] = {}
    given = {
        split: _read(root, folder, classes, size, channels, hashes)
        for split, folder in folders.items()
        if folder is not None
    }
    facts = {
        "layout": "image folder",
        "source": root.name,
        "sha256": {"files": joint_sha256(hashes)},
        "files": len(hashes),
    }
    return image_dataset(
        request.spec,
        *given["train"],
        classes,
        facts,
        test=given.get("test"),
        valid=given.get("valid"),
        **request.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "test_fraction": test_fraction},
        root=root,
    )


def holds(path: Path) -> bool:
    """Whether a path is a folder of class folders.

    Args:
        path: the folder, or one with a folder `train` in it.
    """
    return bool(class_folders(_split(path, "train") or path))


def class_folders(root: Path) -> list[str]:
    """The sorted names of the folders that hold at least one image: the classes.

    Args:
        root: the folder they are in.
    """
    if not root.is_dir():
        return []
    folders = [p for p in root.iterdir() if p.is_dir()]
    return sorted(p.name for p in folders if any(_is_image(f) for f in p.iterdir()))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _split(root: Path, *names: str) -> Path | None:
    """The first of the named sub-folders that has class folders."""
    return next((root / name for name in names if class_folders(root / name)), None)


def _read(
    root: Path, folder: Path, classes: list[str], size: int, channels: int, hashes: dict[str, str]
) -> Labeled:
    """The images and labels of one split; adds the hash of each file to `hashes`."""
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise DamagedData(
            f"{folder} has classes that the training split lacks: {unknown}; it has {classes}."
        )
    images: list[Tensor] = []
    labels: list[int] = []
    mode = "RGB" if channels == 3 else "L"
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        for path in sorted(p for p in (folder / name).iterdir() if _is_image(p)):
            picture = read_image(path, read_file(path), FORMATS, mode)
            images.append(fitted(picture, size, channels))
            labels.append(label)
            hashes[path.relative_to(root).as_posix()] = file_sha256(path)
    if not images:
        raise DamagedData(f"{folder} holds no image of the classes {classes}.")
    return torch.stack(images), torch.tensor(labels)


def fitted(picture: Any, size: int, channels: int) -> Tensor:
    """A picture as uint8 (channels, size, size): the shorter side resized, the middle cut out.

    Args:
        picture: a PIL image.
        size: the side in pixels.
        channels: 1 (gray) or 3 (RGB).
    """
    from PIL import Image, ImageOps

    picture = picture.convert("RGB" if channels == 3 else "L")
    cut = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    pixels = np.array(cut, dtype=np.uint8).reshape(size, size, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
