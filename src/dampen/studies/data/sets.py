"""The table of data sets and the one function that loads any of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from dampen.extensions import Registry, hint
from dampen.names import nearest
from dampen.studies.data.arrays import FEATURE_ARRAYS, IMAGE_ARRAYS, load_arrays
from dampen.studies.data.corpus import TEXT, load_corpus, text_file
from dampen.studies.data.dataset import TEST_SEED, Dataset, DataSource, Request
from dampen.studies.data.digits import DIGITS, load_digits
from dampen.studies.data.files import search_path
from dampen.studies.data.folder import FOLDER, holds, load_folder
from dampen.studies.data.hub import HUB_IMAGES, HUB_TEXT, load_saved_images, load_saved_text
from dampen.studies.data.own_function import FUNCTION
from dampen.studies.data.texts import TABLE, load_table


def _needs_its_function(ask: Request, **options: Any) -> Dataset:
    raise ValueError("data 'function' is read by a function of yours: say --data file.py:load.")


def _classes_only(path: Path) -> bool:
    """Folders of images that are classes: those that a plug-in knows better are its own."""
    return holds(path) and not any(
        source.holds(path) for source in DATASETS.values() if source.chosen_by_path and source.holds
    )


def _checked(thing: Any) -> DataSource:
    """What a plug-in adds: a DataSource, or a pair of DataSpec and reader."""
    if isinstance(thing, DataSource):
        return thing
    if isinstance(thing, tuple) and len(thing) == 2:
        return DataSource(*thing)
    raise ValueError(f"a data set of a plug-in is {thing!r}; expected a DataSource, or a pair of DataSpec and reader.")


_OWN = (
    DataSource(
        DIGITS,
        load_digits,
        steps=("nothing to fetch: the digits come with scikit-learn",),
        preset={
            "model": {"name": "vit", "patch_size": 2, "width": 48, "depth": 3, "heads": 4, "mlp": 96},
            "train": {"epochs": 30, "lr": 3e-3, "warmup": 2.0},
        },
    ),
    DataSource(
        FOLDER,
        load_folder,
        _classes_only,
        general=True,
        steps=("nothing to fetch: put your own images into one folder per class and say --data-dir",),
    ),
    DataSource(
        TEXT,
        load_corpus,
        lambda path: text_file(path) is not None,
        general=True,
        steps=("nothing to fetch: say --data-dir FILE.txt",),
    ),
    DataSource(TABLE, load_table),
    DataSource(IMAGE_ARRAYS, load_arrays),
    DataSource(FEATURE_ARRAYS, load_arrays),
    DataSource(HUB_TEXT, load_saved_text),
    DataSource(HUB_IMAGES, load_saved_images),
    DataSource(FUNCTION, _needs_its_function),
)
DATASETS: Registry[DataSource] = Registry("dampen.data", {source.spec.name: source for source in _OWN}, _checked)
"""Every set that can be loaded, by name: dampen's own, and those that packages and plug-ins add."""


def options(name: str) -> dict[str, Any]:
    """The options that a set takes beyond the common arguments of `load`, with their defaults.

    >>> options("digits")
    {'test_fraction': 0.25, 'test_limit': None}
    """
    parameters = inspect.signature(source_of(name).read).parameters
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
    source = source_of(name)
    ask = Request(source.spec, data_dir, partial, seed, train_fraction, limit, test_seed)
    return source.read(ask, **extra)


def source_of(name: str) -> DataSource:
    """A data set by name, or an error with the nearest name."""
    if name not in DATASETS:
        raise ValueError(f"Unknown data set {name!r}{hint('dampen.data', name, DATASETS)}")
    return DATASETS[name]


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Where a set lies, without reading it; None if nowhere. Embedded sets lie nowhere."""
    source = DATASETS.get(name)
    if source is None or source.holds is None:
        return None
    for root in search_path(data_dir):
        for path in (root, *(root / candidate for candidate in source.candidates)):
            if path.exists() and source.holds(path):
                return path
    return None
