"""Reading run folders: what is whole becomes runs, what is not is listed with the reason and skipped."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison
from dampen.studies.errors import LabError
from dampen.studies.files import read_json
from dampen.studies.records.diagnosis import parse_diagnosis
from dampen.studies.records.logged_run import LoggedRun, read_error
from dampen.studies.records.rebuild import rebuild_plan
from dampen.studies.records.record import RunStore
from dampen.studies.records.result import parse_result
from dampen.studies.report.stored import BENCH, MEASURED, folders_below, packed_text, unpack

BENCH_KEYS = ("machine", "ratios", "papers", "alternatives", "memory", "targets", "skipped")


@dataclass(frozen=True)
class Skipped:
    """A folder or file that could not be used, and why."""

    path: str
    reason: str


@dataclass
class Collection:
    """Everything found under the given folders."""

    runs: dict[Path, LoggedRun] = field(default_factory=dict)
    plans: dict[Path, Comparison] = field(default_factory=dict)  # by the folder of plan.json
    searches: dict[Path, dict[str, Any]] = field(default_factory=dict)  # search.json beside a plan
    benches: list[dict[str, Any]] = field(default_factory=list)  # records of `dampen bench`
    skipped: list[Skipped] = field(default_factory=list)


def collect(paths: Sequence[Path | str]) -> Collection:
    """Read every plan and trial below `paths`, or in files of records and of costs. A path that does not exist is an
    error; damaged content is listed."""
    found = Collection()
    for root in map(Path, paths):
        if root.is_file():
            _read_file(root, found)
        elif root.is_dir():
            _read_below(root, found)
        else:
            raise LabError(f"There is no folder {root}. Give the folder that dampen run, compare or demo wrote.")
    return found


def _read_below(root: Path, found: Collection) -> None:
    for folder in folders_below(root):
        _read_folder(folder, found, label(folder, root))


def _read_file(file: Path, found: Collection) -> None:
    try:
        content = json.loads(packed_text(file))
    except ValueError as error:
        raise LabError(f"{file} is damaged: {error}. Make or fetch the file again.") from error
    if isinstance(content, dict) and content.get("kind") == BENCH:
        missing = [key for key in BENCH_KEYS if not isinstance(content.get(key), dict)]
        if missing:
            found.skipped.append(Skipped(file.name, f"damaged: a record of costs without {', '.join(missing)}"))
        else:
            found.benches.append(content)
        return
    with tempfile.TemporaryDirectory() as name:
        unpack(file, content, Path(name))
        _read_below(Path(name), found)
        for run in found.runs.values():
            run.lines()  # while the log is there


def label(folder: Path, root: Path) -> str:
    """How a folder is called in lists: relative to what was given, or by its own name."""
    relative = folder.relative_to(root)
    return str(relative) if relative.parts else folder.resolve().name


def _read_folder(folder: Path, found: Collection, name: str) -> None:
    files = {p.name for p in folder.iterdir()}
    if "plan.json" in files:
        try:
            found.plans[folder] = Comparison.load(folder)
        except (LabError, KeyError, TypeError, AttributeError) as error:
            found.skipped.append(Skipped(f"{name}/plan.json", _told(error, folder)))
            rebuilt = rebuild_plan(folder)
            if rebuilt.header["metric"]:
                found.plans[folder] = rebuilt
        if "search.json" in files:
            try:
                found.searches[folder] = read_json(folder / "search.json")
            except LabError as error:
                found.skipped.append(Skipped(f"{name}/search.json", _told(error, folder)))
    elif "config.json" in files:
        run = _read_run(folder)
        if isinstance(run, LoggedRun):
            found.runs[folder] = run
        else:
            found.skipped.append(Skipped(name, run))
    elif not files:
        found.skipped.append(Skipped(name, "empty folder"))
    elif files & {"final.json", "log.jsonl", "environment.json"}:
        found.skipped.append(Skipped(name, "no config.json: what was run is not known"))


def _read_run(folder: Path) -> LoggedRun | str:
    """The run, or why it cannot be used."""
    record = RunStore(folder)
    try:
        config = read_json(folder / "config.json")
        content = record.final()
        final = None if content is None else parse_result(content, config["id"])
        measured = parse_diagnosis(read_json(folder / MEASURED) if (folder / MEASURED).exists() else {})
        error = read_error(folder) if final is None else ""
        run = LoggedRun(folder, config["id"], config, final, record.sessions(), measured, error)
        _check_config(config)
    except (LabError, OSError, ValueError) as error:
        return _told(error, folder)
    except (KeyError, TypeError, AttributeError) as error:
        return f"damaged: not the content that was expected ({type(error).__name__}: {error})"
    return run


def _check_config(config: dict[str, Any]) -> None:
    """What tables are made of must be there; the rest is the trainer's business."""
    own = config.get("function") is not None
    if own and not isinstance(config["function"]["name"], str):
        raise LabError("config.json: function has no name")
    if own:
        config = {"data": {"name": ""}, "model": {"name": ""}, "train": {"lr": 0}, **config}  # it has none of these
    if not isinstance(config["data"]["name"], str) or not isinstance(config["model"]["name"], str):
        raise LabError("config.json: data and model have no name")
    if not isinstance(config["methods"], list) or not all(isinstance(m["name"], str) for m in config["methods"]):
        raise LabError("config.json: methods is not a list of methods with names")
    if not isinstance(config["train"]["lr"], int | float) or not isinstance(config["seed"], int):
        raise LabError("config.json: train.lr or seed is not a number")


def _told(error: BaseException, folder: Path) -> str:
    """The first line of the message, without paths of this machine: pages are passed on."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"damaged: {line}".replace(f"{folder}{os.sep}", "")
