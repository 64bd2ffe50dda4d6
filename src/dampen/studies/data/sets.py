"""The table of data sets and the one function that loads any of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dampen.extensions import from_packages
from dampen.names import nearest
from dampen.studies.data.arrays import FEATURE_ARRAYS, IMAGE_ARRAYS, load_arrays
from dampen.studies.data.cifar import CIFAR10, CIFAR100, load_cifar
from dampen.studies.data.coco import COCO, load_coco
from dampen.studies.data.corpus import SHAKESPEARE, TEXT, load_corpus
from dampen.studies.data.dataset import TEST_SEED, Dataset, DataSpec, Request
from dampen.studies.data.digit_captions import DIGIT_CAPTIONS, load_digit_captions
from dampen.studies.data.digits import DIGITS, load_digits
from dampen.studies.data.folder import FOLDER, load_folder
from dampen.studies.data.fsdd import FSDD, load_fsdd
from dampen.studies.data.gtzan import GTZAN, load_gtzan
from dampen.studies.data.hub import HUB_IMAGES, HUB_TEXT, load_saved_images, load_saved_text
from dampen.studies.data.own_function import FUNCTION
from dampen.studies.data.parallel import MULTI30K, PARALLEL, load_parallel
from dampen.studies.data.texts import TABLE, load_table
from dampen.studies.data.thumos import THUMOS14, load_thumos
from dampen.studies.data.voc import BCCD, VOC, load_voc


def _needs_its_function(ask: Request, **options: Any) -> Dataset:
    raise ValueError("data 'function' is read by a function of yours: say --data file.py:load.")


_TABLE: list[tuple[DataSpec, Callable[..., Dataset]]] = [
    (DIGITS, load_digits),
    (DIGIT_CAPTIONS, load_digit_captions),
    (CIFAR10, load_cifar),
    (CIFAR100, load_cifar),
    (FOLDER, load_folder),
    (GTZAN, load_gtzan),
    (FSDD, load_fsdd),
    (THUMOS14, load_thumos),
    (BCCD, load_voc),
    (VOC, load_voc),
    (COCO, load_coco),
    (MULTI30K, load_parallel),
    (PARALLEL, load_parallel),
    (SHAKESPEARE, load_corpus),
    (TEXT, load_corpus),
    *from_packages("dampen.data").values(),  # each a pair as above, under its spec's name
    (TABLE, load_table),
    (IMAGE_ARRAYS, load_arrays),
    (FEATURE_ARRAYS, load_arrays),
    (HUB_TEXT, load_saved_text),
    (HUB_IMAGES, load_saved_images),
    (FUNCTION, _needs_its_function),
]
DATASETS: dict[str, DataSpec] = {spec.name: spec for spec, _ in _TABLE}
_READERS: dict[str, Callable[..., Dataset]] = {spec.name: reader for spec, reader in _TABLE}


def options(name: str) -> dict[str, Any]:
    """The options that a set takes beyond the common arguments of `load`, with their defaults.

    >>> options("cifar10")
    {'labels': 'fine', 'test_limit': None}
    """
    parameters = inspect.signature(_READERS[_known(name)]).parameters
    return {key: p.default for key, p in parameters.items() if key not in ("ask", "options")}


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    partial: bool = False,
    seed: int = 0,
    train_fraction: float = 0.7,
    limit: int | None = None,
    test_seed: int = TEST_SEED,
    **extra: Any,
) -> Dataset:
    """Load a data set by name.

    It is looked for in `data_dir` if that is said, else in $DAMPEN_DATA, then in ~/.cache/dampen/data. The official
    test part is kept apart; where there is no official validation part, `train_fraction` of the rest is drawn by class
    with `seed` to train on, and what remains validates. `limit` keeps at most so many examples outside the test part.
    Where there is no official test part, it is drawn with `test_seed`.
    `partial=True` accepts an incomplete copy; `info` then says what is missing. `options(name)` lists what else a
    set takes.
    """
    known = options(name)
    for key in extra:
        if key not in known:
            raise TypeError(f"Data set {name!r} takes no option {key!r}{nearest(key, known)}")
    ask = Request(DATASETS[name], data_dir, partial, seed, train_fraction, limit, test_seed)
    return _READERS[name](ask, **extra)


def _known(name: str) -> str:
    if name not in DATASETS:
        raise ValueError(f"Unknown data set {name!r}{nearest(name, DATASETS)}")
    return name
