"""Pascal VOC's layout: one XML file of objects per image, lists of images per part; and BCCD, which
comes in it.

Everingham et al., "The PASCAL visual object classes challenge", 2010. BCCD: 364 images of blood
smears, 640 x 480, with boxes around red cells, white cells and platelets (MIT license)."""

from __future__ import annotations

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
    joint_sha256,
    read_file,
    require_complete,
)
from reproductions.data.markup import Element, parse_xml
from reproductions.data.objects import Annotated, checked_box, object_dataset

LAYOUT = "Annotations/*.xml, JPEGImages/*.jpg and ImageSets/Main/{train,val,test}.txt"
VOC = DataSpec(
    "voc",
    "objects",
    "any images with boxes in the layout of Pascal VOC",
    "your own images, or the page 'The PASCAL Visual Object Classes Homepage'; annotation tools "
    "export this layout",
    LAYOUT,
)
BCCD = DataSpec(
    "bccd",
    "objects",
    "BCCD: 364 images of blood smears with boxes around 4,888 red cells, white cells and platelets",
    "the repository Shenggan/BCCD_Dataset on GitHub (its folder BCCD)",
    f"BCCD/{LAYOUT}",
)
CANDIDATES = {
    "bccd": ["bccd/BCCD", "BCCD_Dataset/BCCD", "BCCD", "bccd"],
    "voc": ["voc", "VOC2012", "VOC2007"],
}
CLASSES = {"bccd": ["Platelets", "RBC", "WBC"]}
COUNTS = {"bccd": {"train": 205, "valid": 87, "test": 72}}
LISTS = {"train": "train", "valid": "val", "test": "test"}


def load_voc(
    ask: Request,
    *,
    size: tuple[int, int] = (96, 128),
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images and objects as the lists of each part say; images are resized to `size` (height,
    width).

    Where there is no list of test images, that of the validation images is the test (Pascal keeps
    its test labels), and validation is drawn from the training part. Objects marked difficult are
    neither learned nor counted as missed."""
    root = find(ask.spec, ask.data_dir, CANDIDATES[ask.spec.name], holds)
    names = {
        part: _names(root / "ImageSets" / "Main" / f"{file}.txt") for part, file in LISTS.items()
    }
    names = {part: listed for part, listed in names.items() if listed}
    departures = []
    if "train" not in names:
        raise DamagedData(
            f"{root / 'ImageSets' / 'Main' / 'train.txt'} lists no image: say which ones train."
        )
    if "test" not in names and "valid" in names:
        names["test"] = names.pop("valid")
        departures.append(
            "no list of test images: those of val.txt serve as test, and validation is drawn from "
            "train"
        )
    _disjoint(names, root)
    known = CLASSES.get(ask.spec.name)
    classes = known or sorted({o for name in names["train"] for o in _object_names(root, name)})
    if not classes:
        raise DamagedData(f"{root / 'Annotations'}: no training image has any object.")
    parts = {
        part: [_annotated(root, name, classes) for name in listed] for part, listed in names.items()
    }
    official = COUNTS.get(ask.spec.name, {})
    problems = [
        f"{len(parts.get(part, []))} of {count} {part} images are listed"
        for part, count in official.items()
        if len(parts.get(part, [])) < count
    ]
    departures += require_complete(problems, ask.partial, ask.spec.name)
    files = [_file(root, name) for listed in names.values() for name in listed]
    facts = {
        "layout": "Pascal VOC",
        "source": root.name,
        "sha256": {"annotations": joint_sha256({f.name: file_sha256(f) for f in files})},
        "partial": bool(problems),
        "departures": departures,
    }
    cut: dict[str, Any] = {"test_fraction": test_fraction, "test_limit": test_limit}
    return object_dataset(ask, parts, classes, facts, root, size=size, channels=channels, **cut)


def holds(path: Path) -> bool:
    return all((path / name).is_dir() for name in ("Annotations", "JPEGImages", "ImageSets/Main"))


def _names(path: Path) -> list[str]:
    """The images of a list, one name a line; names lead nowhere else. Nothing where there is no
    list.
    """
    if not path.exists():
        return []
    try:
        lines = read_file(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DamagedData(f"{path} is damaged: {error}. It lists one image name a line.") from error
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if (
            len(words) > 1
            or words[0] != Path(words[0]).name
            or "\0" in words[0]
            or words[0] in names[-1:]
        ):
            raise DamagedData(
                f"{path}, line {number}: {line!r} is not the name of one image, once. Correct the "
                "list."
            )
        names.append(words[0])
    return names


def _disjoint(names: dict[str, list[str]], root: Path) -> None:
    """An image in two parts, or twice in one, would be learned and then tested."""
    seen: dict[str, str] = {}
    for part, listed in names.items():
        for name in listed:
            if name in seen:
                raise DamagedData(
                    f"{root / 'ImageSets' / 'Main'}: {name} is listed in {seen[name]} and in "
                    f"{part}."
                )
            seen[name] = part


def _file(root: Path, name: str) -> Path:
    path = root / "Annotations" / f"{name}.xml"
    if not path.is_file():
        raise DamagedData(
            f"{path} is missing, but its image is listed. Fetch it, or take it off the list."
        )
    return path


def _read(path: Path) -> Element:
    outer = parse_xml(read_file(path), path)
    if outer.name != "annotation":
        raise DamagedData(f"{path}, line {outer.line}: got <{outer.name}>, expected <annotation>.")
    return outer


def _object_names(root: Path, name: str) -> set[str]:
    path = _file(root, name)
    return {found.one("name", path).text.strip() for found in _read(path).all("object")}


def _annotated(root: Path, name: str, classes: list[str]) -> Annotated:
    path = _file(root, name)
    outer = _read(path)
    size = outer.one("size", path)
    width, height = (
        _number(size.one(side, path), path, whole=True) for side in ("width", "height")
    )
    if min(width, height) < 1:
        raise DamagedData(
            f"{path}, line {size.line}: the image is {width} x {height}; expected at least 1 x 1."
        )
    labels, boxes, ignored = [], [], []
    for found in outer.all("object"):
        label = found.one("name", path)
        if label.text.strip() not in classes:
            known = ", ".join(classes)
            raise DamagedData(
                f"{path}, line {label.line}: unknown class {label.text.strip()!r}; known are "
                f"{known}."
            )
        box = found.one("bndbox", path)
        left, top, right, bottom = (
            _number(box.one(k, path), path) for k in ("xmin", "ymin", "xmax", "ymax")
        )
        # Pascal counts pixels from 1, and the last one belongs to the box.
        inside = checked_box(
            (left - 1, top - 1, right, bottom), int(width), int(height), f"{path}, line {box.line}"
        )
        labels.append(classes.index(label.text.strip()))
        boxes.append(inside)
        ignored.append(any(d.text.strip() == "1" for d in found.all("difficult")))
    image = next(
        (p for e in ("jpg", "jpeg", "png") if (p := root / "JPEGImages" / f"{name}.{e}").is_file()),
        None,
    )
    if image is None:
        raise DamagedData(
            f"{root / 'JPEGImages' / f'{name}.jpg'} is missing, but it is listed and annotated."
        )
    return Annotated(image, int(width), int(height), tuple(labels), tuple(boxes), tuple(ignored))


def _number(element: Element, path: Path, whole: bool = False) -> float:
    try:
        return int(element.text) if whole else float(element.text)
    except ValueError as error:
        got = f"<{element.name}>{element.text[:40]}"
        raise DamagedData(
            f"{path}, line {element.line}: got {got}, expected a number. Correct the file."
        ) from error


PRESET: dict[str, Any] = {
    "data": {"augment": ["flip", "vertical_flip"]},
    "model": {
        "name": "detr",
        "width": 64,
        "depth": 2,
        "decoder_depth": 2,
        "heads": 4,
        "mlp": 128,
        "queries": 48,
    },
    "train": {
        "epochs": 80,
        "batch_size": 8,
        "lr": 2e-3,
        "warmup": 2.0,
        "clip": 1.0,
        "validate_every": 10,
    },
}
BCCD_SOURCE = DataSource(
    BCCD,
    load_voc,
    lambda path: holds(path) and path.name.lower() == "bccd",
    CANDIDATES["bccd"],
    steps=(
        "git clone https://github.com/Shenggan/BCCD_Dataset   # read from BCCD_Dataset/BCCD as it "
        "is",
    ),
    preset=PRESET,
)
VOC_SOURCE = DataSource(
    VOC,
    load_voc,
    holds,
    CANDIDATES["voc"],
    general=True,
    chosen_by_path=True,
    steps=(
        "nothing to fetch: put your own images into the layout of Pascal VOC and say --data-dir",
    ),
)
