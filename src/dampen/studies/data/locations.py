"""Where each set may lie below a data folder, and how to tell at a glance that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dampen.studies.data import cifar, coco, corpus, folder, fsdd, gtzan, parallel, thumos, voc
from dampen.studies.data.files import search_path


@dataclass(frozen=True)
class Place:
    """Usual names below a data folder; a look that reads no file's content; whether the layout is anybody's."""

    candidates: list[str]
    holds: Callable[[Path], bool]
    general: bool = False


def _classes_only(path: Path) -> bool:
    """Folders of images that are classes: those beside files of boxes are parts."""
    return folder.holds(path) and not voc.holds(path) and not coco.holds(path)


PLACES: dict[str, Place] = {
    "cifar10": Place(cifar.CANDIDATES["cifar10"], lambda path: cifar.looks_like("cifar10", path)),
    "cifar100": Place(cifar.CANDIDATES["cifar100"], lambda path: cifar.looks_like("cifar100", path)),
    "gtzan": Place(gtzan.CANDIDATES, gtzan.holds),
    "fsdd": Place(fsdd.CANDIDATES, lambda path: bool(fsdd.recordings(path))),
    "thumos14": Place(thumos.CANDIDATES, thumos.holds),
    "bccd": Place(voc.CANDIDATES["bccd"], lambda path: voc.holds(path) and path.name.lower() == "bccd"),
    "multi30k": Place(["multi30k"], lambda path: parallel.holds(path) and parallel.is_multi30k(path)),
    "tinyshakespeare": Place(["tinyshakespeare"], corpus.is_shakespeare),
    "folder": Place([], _classes_only, general=True),
    "voc": Place(voc.CANDIDATES["voc"], voc.holds, general=True),
    "coco": Place(coco.CANDIDATES, coco.holds, general=True),
    "parallel": Place(["parallel"], parallel.holds, general=True),
    "text": Place([], lambda path: corpus.text_file(path) is not None, general=True),
}


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Where a set lies, without reading it; None if nowhere. Embedded sets lie nowhere."""
    if name not in PLACES:
        return None
    place = PLACES[name]
    for root in search_path(data_dir):
        for path in (root, *(root / candidate for candidate in place.candidates)):
            if path.exists() and place.holds(path):
                return path
    return None
