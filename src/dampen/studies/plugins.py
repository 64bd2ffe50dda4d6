"""The door for plug-ins: data sets, models, tasks, metrics, methods and recipes
from outside the package.

A plug-in is a module that calls `register` when it is imported:

    # myplugin.py
    from dampen.studies import plugins

    plugins.register(
        __name__,
        data={"stars": "stars_data:STARS"},        # a DataSource
        models={"resnet": "stars_models:ResNet"},  # a torch.nn.Module class
    )

Each thing is given as "module:attribute", which is imported when its name is first used, or as the
object itself. dampen loads a plug-in in three ways. A recipe names it, `plugins = ["myplugin"]`.
The environment variable `DAMPEN_PLUGINS` lists it. Or it is installed, and declares its things as
entry points (see `dampen.extensions`). A module that is not installed is looked for in the current
folder, then from the folder of the recipe upward. Workers and Ray processes import the same
plug-ins. A plug-in is no part of the identity of a run: a recipe that names it has the same runs as
one that does not.

This module also holds what a plug-in needs to write readers, metrics and losses. The folder
`reproductions` of dampen's repository is the first plug-in and imports nothing else of the studies.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dampen.extensions as extensions
from dampen.studies.errors import ConfigError

if TYPE_CHECKING:
    from dampen.studies.comparison import Setting as Setting
    from dampen.studies.data.arrays import ArraySplit as ArraySplit
    from dampen.studies.data.dataset import TEST_SEED as TEST_SEED
    from dampen.studies.data.dataset import Batch as Batch
    from dampen.studies.data.dataset import DamagedData as DamagedData
    from dampen.studies.data.dataset import Dataset as Dataset
    from dampen.studies.data.dataset import DataSource as DataSource
    from dampen.studies.data.dataset import DataSpec as DataSpec
    from dampen.studies.data.dataset import DataTransform as DataTransform
    from dampen.studies.data.dataset import IncompleteData as IncompleteData
    from dampen.studies.data.dataset import MissingData as MissingData
    from dampen.studies.data.dataset import Normalization as Normalization
    from dampen.studies.data.dataset import Request as Request
    from dampen.studies.data.dataset import Split as Split
    from dampen.studies.data.dataset import damaged as damaged
    from dampen.studies.data.dataset import require_complete as require_complete
    from dampen.studies.data.files import BROKEN as BROKEN
    from dampen.studies.data.files import file_sha256 as file_sha256
    from dampen.studies.data.files import find as find
    from dampen.studies.data.files import joint_sha256 as joint_sha256
    from dampen.studies.data.files import limit_of as limit_of
    from dampen.studies.data.files import parse_npy as parse_npy
    from dampen.studies.data.files import read_file as read_file
    from dampen.studies.data.files import read_image as read_image
    from dampen.studies.data.files import read_npz as read_npz
    from dampen.studies.data.files import require_within as require_within
    from dampen.studies.data.files import sha256 as sha256
    from dampen.studies.data.images import channel_statistics as channel_statistics
    from dampen.studies.data.images import image_dataset as image_dataset
    from dampen.studies.data.splits import draw_name as draw_name
    from dampen.studies.data.splits import limited as limited
    from dampen.studies.data.splits import split_rows as split_rows
    from dampen.studies.data.splits import stratified as stratified
    from dampen.studies.data.splits import train_and_valid as train_and_valid
    from dampen.studies.diagnose.measure import Section as Section
    from dampen.studies.diagnose.measure import Settings as Settings
    from dampen.studies.diagnose.trained import Trained as Trained
    from dampen.studies.errors import LabError as LabError
    from dampen.studies.metric import Metric as Metric
    from dampen.studies.metrics import Metrics as Metrics
    from dampen.studies.metrics import Task as Task
    from dampen.studies.metrics import require_batches as require_batches
    from dampen.studies.report.diagnosis import diagnosed as diagnosed
    from dampen.studies.report.diagnosis import line_panels as line_panels
    from dampen.studies.report.diagnosis import measured as measured
    from dampen.studies.report.diagnosis import over_seeds as over_seeds
    from dampen.studies.report.figures import ROW as ROW
    from dampen.studies.report.figures import Column as Column
    from dampen.studies.report.figures import Figure as Figure
    from dampen.studies.report.figures import Palette as Palette
    from dampen.studies.report.figures import Panel as Panel
    from dampen.studies.report.figures import band_chart as band_chart
    from dampen.studies.report.figures import finish as finish
    from dampen.studies.report.figures import known as known
    from dampen.studies.report.figures import note as note
    from dampen.studies.report.figures import some as some
    from dampen.studies.report.figures import tip as tip
    from dampen.studies.report.formats import markdown_text as markdown_text
    from dampen.studies.result import Detected as Detected
    from dampen.studies.table import axis_name as axis_name
    from dampen.studies.table import chosen_setting as chosen_setting
    from dampen.studies.text import BEGIN as BEGIN
    from dampen.studies.text import END as END
    from dampen.studies.text import PAD as PAD
    from dampen.studies.text import Bpe as Bpe
    from dampen.studies.text import pad_tokens as pad_tokens
    from dampen.studies.trainer.data import derive as derive

ENVIRONMENT = "DAMPEN_PLUGINS"
KINDS = tuple(group.removeprefix("dampen.") for group in extensions.GROUPS)

_HOMES = {
    "data.arrays": ("ArraySplit",),
    "data.dataset": (
        "TEST_SEED",
        "Batch",
        "DamagedData",
        "Dataset",
        "DataSource",
        "DataSpec",
        "DataTransform",
        "IncompleteData",
        "MissingData",
        "Normalization",
        "Request",
        "Split",
        "damaged",
        "require_complete",
    ),
    "data.files": (
        "BROKEN",
        "limit_of",
        "file_sha256",
        "find",
        "joint_sha256",
        "parse_npy",
        "read_file",
        "read_image",
        "read_npz",
        "require_within",
        "sha256",
    ),
    "data.images": (
        "channel_statistics",
        "image_dataset",
    ),
    "data.splits": (
        "draw_name",
        "limited",
        "split_rows",
        "stratified",
        "train_and_valid",
    ),
    "diagnose.measure": ("Section", "Settings"),
    "diagnose.trained": ("Trained",),
    "errors": ("LabError",),
    "metrics": ("Metrics", "Task", "require_batches"),
    "metric": ("Metric",),
    "result": ("Detected",),
    "comparison": ("Setting",),
    "table": ("axis_name", "chosen_setting"),
    "report.diagnosis": ("diagnosed", "line_panels", "measured", "over_seeds"),
    "report.figures": (
        *("ROW", "Column", "Figure", "Palette", "Panel", "band_chart", "finish", "known", "note"),
        *("some", "tip"),
    ),
    "report.formats": ("markdown_text",),
    "text": ("BEGIN", "END", "PAD", "Bpe", "pad_tokens"),
    "trainer.data": ("derive",),
}
__all__ = [
    "activate",
    "active",
    "load_plugins",
    "register",
    *(n for names in _HOMES.values() for n in names),
]

_active: dict[str, str] = {}  # name of the module -> the folder that holds it


def register(plugin: str, **kinds: Mapping[str, Any]) -> None:
    """Add what a plug-in brings.

    Args:
        plugin: the plug-in's `__name__`.
        kinds: `data`, `transforms`, `augmentations`, `models`, `tasks`, `metrics`, `methods`,
            `engines`, `loggers`, `recipes`, `figures`, `formulations` or `diagnoses`; each a table
            from a name to the thing, or to "module:attribute". Recipes are paths of TOML files. A
            figure is a function of a ResultTable and a Palette that returns a Figure for the
            report, or None. A formulation is a step that `dampen bench` times beside a method: see
            `dampen.studies.bench`. A diagnosis is a `Section` that `dampen diagnose` measures.
    """
    for kind, things in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"{plugin} registers {kind!r}; a plug-in adds {', '.join(KINDS)}.")
        extensions.register(f"dampen.{kind}", things)
    file = getattr(sys.modules.get(plugin), "__file__", None)
    if file is not None:
        place = Path(file).resolve()
        package = place.name == "__init__.py"
        _active[plugin] = str(place.parents[plugin.count(".") + package])


def active() -> tuple[tuple[str, str], ...]:
    """The plug-ins that are loaded in this process: each a module and the folder that holds it."""
    return tuple(_active.items())


def activate(plugins: Iterable[tuple[str, str]]) -> None:
    """Load the plug-ins of another process, in a worker that it started."""
    for name, folder in plugins:
        _load(name, [Path(folder)])


def load_plugins(names: Iterable[str], near: Path | None = None) -> None:
    """Import plug-ins by the names of their modules.

    Args:
        names: as in a recipe, `plugins = ["reproductions"]`.
        near: a file; where a module is neither installed nor in the current folder, the folders
            above this file are searched.
    """
    for name in names:
        _load(name, _folders(near))


def folder_of(module: str, near: Path | None = None) -> Path | None:
    """The folder from which `load_plugins` would import a module; None where
    it is not in one of these.

    Args:
        module: the first part of a plug-in's name.
        near: as for `load_plugins`.
    """
    return _holding(module, _folders(near))


def _folders(near: Path | None) -> list[Path]:
    return [Path.cwd(), *(near.resolve().parents if near is not None else ())]


def _holding(module: str, folders: list[Path]) -> Path | None:
    return next(
        (f for f in folders if (f / module).is_dir() or (f / f"{module}.py").is_file()), None
    )


def load_from_environment() -> None:
    """Import the plug-ins that `DAMPEN_PLUGINS` lists, separated by commas."""
    load_plugins(
        filter(None, (name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",")))
    )


def _load(name: str, folders: list[Path]) -> None:
    if name in sys.modules:
        importlib.import_module(name)
        return
    first, *inside = name.split(".")
    if not first.isidentifier() or not all(part.isidentifier() for part in inside):
        raise ConfigError("plugins", [f"expected the name of a Python module, got {name!r}"])
    folder = _holding(first, folders)
    if folder is None and importlib.util.find_spec(first) is None:
        looked = ", ".join(map(str, folders[:4]))
        raise ConfigError(
            "plugins",
            [f"there is no plug-in {name!r}. It is not installed, and not in {looked}, or above"],
        )
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever the import of foreign code raises
        raise ConfigError(
            "plugins", [f"{name} cannot be imported: {type(error).__name__}: {error}"]
        ) from error


def __getattr__(name: str) -> Any:
    """Import on first use: a plug-in registers without waiting for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"dampen.studies.{module}"), name)
    raise AttributeError(f"module 'dampen.studies.plugins' has no attribute {name!r}")
