"""COCO's layout: one JSON file per part with images, categories and annotations.

Lin et al., "Microsoft COCO: common objects in context" (arXiv 1405.0312). Many tools export the
same form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dampen.studies.plugins import (
    DamagedData,
    Dataset,
    DataSource,
    DataSpec,
    Request,
    file_sha256,
    find,
    read_file,
)
from reproductions.data.archives import parse_json
from reproductions.data.objects import Annotated, checked_box, object_dataset

COCO = DataSpec(
    "coco",
    "objects",
    "COCO, or any images with boxes in its layout: a JSON file of images, categories and "
    "annotations per part",
    "the page 'COCO - Common Objects in Context' (train2017.zip, val2017.zip, "
    "annotations_trainval2017.zip), unpacked",
    "annotations/instances_{train,val,test}*.json with the images in a folder of the same name "
    "(train2017/) or images/",
)
CANDIDATES = ["coco", "COCO", "coco2017"]
PARTS = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}


def load_coco(
    ask: Request,
    *,
    size: tuple[int, int] = (96, 128),
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images and objects of each part; images are resized to `size` (height, width).

    COCO keeps the labels of its test part: where there is none, the validation part is the test,
    and validation is drawn from the training part. Crowds are neither learned nor counted as
    missed. Boxes without area, of which COCO has two, are left out and counted in the record."""
    root = find(ask.spec, ask.data_dir, CANDIDATES, holds)
    found = files(root)
    departures = []
    if "train" not in found:
        raise DamagedData(
            f"{root / 'annotations'} holds no instances_train*.json: say which images train."
        )
    if "test" not in found and "valid" in found:
        found["test"] = found.pop("valid")
        departures.append(
            "no test part with labels: the validation part serves as test, validation is drawn "
            "from train"
        )
    read = {part: Part(root, path) for part, path in found.items()}
    classes = read["train"].classes
    for part in read.values():
        if part.classes != classes:
            raise DamagedData(
                f"{part.path}: its categories {part.classes[:5]} are not those of the training "
                "part."
            )
    examples = {name: part.examples() for name, part in read.items()}
    flat = sum(part.flat for part in read.values())
    departures += [f"{flat} boxes without area were left out"] if flat else []
    facts = {
        "layout": "COCO",
        "source": root.name,
        "sha256": {path.name: file_sha256(path) for path in found.values()},
        "departures": departures,
    }
    cut: dict[str, Any] = {"test_fraction": test_fraction, "test_limit": test_limit}
    return object_dataset(ask, examples, classes, facts, root, size=size, channels=channels, **cut)


def holds(path: Path) -> bool:
    return bool(files(path))


def files(root: Path) -> dict[str, Path]:
    """The file of each part that is there."""
    found: dict[str, Path] = {}
    for part, starts in PARTS.items():
        paths = [
            p
            for s in starts
            for p in sorted((root / "annotations").glob(f"instances_{s}*.json"))
            if p.is_file()
        ]
        if len(paths) > 1:
            raise DamagedData(
                f"{root / 'annotations'} has several files for {part}: {[p.name for p in paths]}. "
                "Keep one."
            )
        found |= {part: paths[0]} if paths else {}
    return found


class Part:
    """One JSON file, checked entry by entry."""

    def __init__(self, root: Path, path: Path):
        self.root, self.path, self.flat = root, path, 0
        table = parse_json(read_file(path), path)
        table = table if isinstance(table, dict) else {}
        lists: dict[str, Any] = {
            key: table.get(key) for key in ("images", "categories", "annotations")
        }
        for key, entries in lists.items():
            if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
                raise DamagedData(
                    f"{path} has no list of entries under {key!r}: it is not in COCO's form."
                )
        self.images, self.categories, self.annotations = (
            lists["images"],
            lists["categories"],
            lists["annotations"],
        )
        named = {
            self._whole(c, "id", i, "categories"): c.get("name")
            for i, c in enumerate(self.categories)
        }
        if (
            len(named) < len(self.categories)
            or not all(isinstance(n, str) and n for n in named.values())
            or not named
        ):
            raise DamagedData(f"{path}: categories must have different ids and a name each.")
        self.numbers = {category: number for number, category in enumerate(sorted(named))}
        self.classes = [str(named[category]) for category in sorted(named)]

    def examples(self) -> list[Annotated]:
        """The images in the order of the file, with their objects."""
        sizes: dict[int, tuple[Path, int, int]] = {}
        for i, entry in enumerate(self.images):
            key = self._whole(entry, "id", i, "images")
            if key in sizes:
                raise self._broken("images", i, f"the id {key} is there twice")
            width, height = (self._whole(entry, side, i, "images") for side in ("width", "height"))
            if min(width, height) < 1:
                raise self._broken("images", i, f"the image is {width} x {height}")
            sizes[key] = self._image(entry.get("file_name"), i), width, height
        objects: dict[int, list[tuple[int, tuple[float, float, float, float], bool]]] = {
            key: [] for key in sizes
        }
        for i, entry in enumerate(self.annotations):
            key, category = (
                self._whole(entry, k, i, "annotations") for k in ("image_id", "category_id")
            )
            if key not in sizes:
                raise self._broken("annotations", i, f"there is no image of id {key}")
            if category not in self.numbers:
                raise self._broken(
                    "annotations", i, f"unknown class: there is no category of id {category}"
                )
            box = self._box(entry.get("bbox"), *sizes[key][1:], i)
            if box is not None:
                objects[key].append((self.numbers[category], box, entry.get("iscrowd") == 1))
        columns = {
            key: tuple(zip(*found, strict=True)) or ((), (), ()) for key, found in objects.items()
        }
        return [Annotated(*sizes[key], *columns[key]) for key in sizes]

    def _box(
        self, given: Any, width: int, height: int, i: int
    ) -> tuple[float, float, float, float] | None:
        """COCO's (left, top, width, height) as corners; None for a box without area."""
        numbers = isinstance(given, list) and len(given) == 4
        if not numbers or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in given
        ):
            raise self._broken("annotations", i, f"bbox is {given!r}, expected four numbers")
        left, top, w, h = map(float, given)
        if min(w, h) == 0 and math.isfinite(left + top + w + h):
            self.flat += 1
            return None
        return checked_box(
            (left, top, left + w, top + h), width, height, f"{self.path}, annotations[{i}]"
        )

    def _image(self, name: Any, i: int) -> Path:
        """The image's file: in the folder of the part's name, or in `images`; names lead nowhere
        else.
        """
        if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
            raise self._broken("images", i, f"file_name is {name!r}, expected the name of a file")
        folders = [self.root / self.path.stem.removeprefix("instances_"), self.root / "images"]
        image = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if image is None:
            raise self._broken(
                "images", i, f"{name} is neither in {folders[0].name}/ nor in images/"
            )
        return image

    def _whole(self, entry: dict[str, Any], key: str, i: int, kind: str) -> int:
        value = entry.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._broken(kind, i, f"{key} is {value!r}, expected a whole number")
        return value

    def _broken(self, kind: str, i: int, problem: str) -> DamagedData:
        return DamagedData(
            f"{self.path}, {kind}[{i}]: {problem}. Correct the entry or fetch the file again."
        )


COCO_SOURCE = DataSource(
    COCO,
    load_coco,
    holds,
    CANDIDATES,
    general=True,
    chosen_by_path=True,
    steps=(
        "mkdir coco && cd coco",
        "curl -LO http://images.cocodataset.org/zips/train2017.zip && unzip train2017.zip   # 19 "
        "GB",
        "curl -LO http://images.cocodataset.org/zips/val2017.zip && unzip val2017.zip",
        "curl -LO http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
        "unzip annotations_trainval2017.zip",
    ),
)
