"""From run folders to studies: what can be read, which runs belong in one table, and what is left
out, with the reason. Mixing protocols is refused."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.comparison import Comparison, Config, Setting, rebuild_plan
from dampen.studies.errors import LabError
from dampen.studies.files import read_json
from dampen.studies.methods_text import methods_as_text
from dampen.studies.report.charts import bench_figures
from dampen.studies.report.packs import (
    BENCH,
    KEPT,
    MEASURED,
    check_file,
    check_levels,
    check_search,
    folders_below,
    packed_text,
    parse_limited,
    unpack,
)
from dampen.studies.report.view import bench_view
from dampen.studies.result import parse_diagnosis, parse_result
from dampen.studies.store import LoggedRun, RunStore, read_error
from dampen.studies.table import LoggedComparison, logged_comparison

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
    """Read every plan and trial below `paths`, or in files of records and of costs. A path that
    does not exist is an error; damaged content is listed.

    Args:
        paths: the folders.
    """
    found = Collection()
    for root in map(Path, paths):
        if root.is_file():
            _read_file(root, found)
        elif root.is_dir():
            _read_below(root, found)
        else:
            what = (
                f"{root} is neither a folder nor a file"
                if root.exists()
                else f"There is no folder {root}"
            )
            raise LabError(f"{what}. Give the folder that dampen run, compare or demo wrote.")
    return found


def _read_below(root: Path, found: Collection) -> None:
    for folder in folders_below(root):
        _read_folder(folder, found, label(folder, root))


def _read_file(file: Path, found: Collection) -> None:
    content = parse_limited(packed_text(file), str(file))
    if isinstance(content, dict) and content.get("kind") == BENCH:
        problem = _wrong_with_bench(content)
        if problem:
            found.skipped.append(Skipped(file.name, problem))
        else:
            found.benches.append(content)
        return
    with tempfile.TemporaryDirectory() as name:
        unpack(file, content, Path(name))
        _read_below(Path(name), found)
        for run in found.runs.values():
            run.lines()  # while the log is there


def _wrong_with_bench(content: dict[str, Any]) -> str:
    """Why a record of costs cannot be shown; empty where it can."""
    missing = [key for key in BENCH_KEYS if not isinstance(content.get(key), dict)]
    if missing:
        return f"damaged: a bench result without {', '.join(missing)}"
    try:
        bench_view(content, bench_figures(content), "b", {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"damaged: not a bench result ({type(error).__name__}: {error})"
    return ""


def label(folder: Path, root: Path) -> str:
    """How a folder is called in lists: relative to what was given, or by its own name.

    Args:
        folder: the folder.
        root: what was given.
    """
    relative = folder.relative_to(root)
    return str(relative) if relative.parts else folder.resolve().name


def _read_folder(folder: Path, found: Collection, name: str) -> None:
    files = {p.name for p in folder.iterdir()}
    for file in sorted(files & set(KEPT)):
        try:
            check_file(folder / file)
        except (LabError, OSError) as error:
            found.skipped.append(Skipped(f"{name}/{file}", _told(error, folder)))
            return
    if "plan.json" in files:
        try:
            plan = Comparison.load(folder)
            check_levels(plan.header, "plan.json")
            check_search(plan.header.get("search") or {}, "plan.json: search")
            found.plans[folder] = plan
        except (LabError, KeyError, TypeError, AttributeError) as error:
            found.skipped.append(Skipped(f"{name}/plan.json", _told(error, folder)))
            rebuilt = rebuild_plan(folder)
            if rebuilt.header["metric"]:
                found.plans[folder] = rebuilt
        if "search.json" in files:
            try:
                search = read_json(folder / "search.json")
                check_search(search, "search.json")
                found.searches[folder] = search
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
        check_levels(config, "config.json")
        content = record.final()
        check_levels(content, "final.json")
        final = None if content is None else parse_result(content, config["id"])
        diagnosis = read_json(folder / MEASURED) if (folder / MEASURED).exists() else {}
        check_levels(diagnosis, MEASURED)
        measured = parse_diagnosis(diagnosis)
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
        config = {
            "data": {"name": ""},
            "model": {"name": ""},
            "train": {"lr": 0},
            **config,
        }  # it has none of these
    if not isinstance(config["data"]["name"], str) or not isinstance(config["model"]["name"], str):
        raise LabError("config.json: data and model have no name")
    if not isinstance(config["methods"], list) or not all(
        isinstance(m["name"], str) for m in config["methods"]
    ):
        raise LabError("config.json: methods is not a list of methods with names")
    if not isinstance(config["train"]["lr"], int | float) or not isinstance(config["seed"], int):
        raise LabError("config.json: train.lr or seed is not a number")


def _told(error: BaseException, folder: Path) -> str:
    """The first line of the message, without paths of this machine: pages are passed on."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return f"damaged: {line}".replace(f"{folder}{os.sep}", "")


def make_studies(
    found: Collection, split: bool = False
) -> tuple[list[LoggedComparison], list[Skipped]]:
    """One study per plan, and one per folder of trials without a plan; what
    belongs nowhere is listed.

    Raises ProtocolMismatch where a folder mixes protocols; `split=True` makes one study per
    protocol instead.

    Args:
        found: what was read.
        split: make one table per protocol.
    """
    studies, skipped, claimed = [], list(found.skipped), set[Path]()
    by_id: dict[str, list[LoggedRun]] = {}
    for run in found.runs.values():
        by_id.setdefault(run.id, []).append(run)
    for folder, plan in found.plans.items():
        study, used = _from_plan(folder, plan, by_id, found.searches)
        claimed |= used
        for run in found.runs.values():
            if run.folder.parent == folder and run.folder not in used:
                claimed.add(run.folder)
                skipped.append(Skipped(run.folder.name, _why_not(run, plan)))
        if study.runs():
            study.protocol = check_protocol(
                study.name, study.runs(), study.grid_keys(), planned=True
            )
            studies.append(study)
        else:
            skipped.append(
                Skipped(folder.name, f"none of its {len(plan.runs)} planned runs has been started")
            )
    loose: dict[Path, list[LoggedRun]] = {}
    for run in found.runs.values():
        if run.folder not in claimed:
            loose.setdefault(run.folder.parent, []).append(run)
    for folder, runs in loose.items():
        for group in protocol_groups(runs) if split else [runs]:
            study = _from_runs(folder, group)
            study.protocol = check_protocol(
                study.name, study.runs(), study.grid_keys(), planned=False
            )
            studies.append(study)
    return studies, skipped


def _why_not(run: LoggedRun, plan: Comparison) -> str:
    """Why a trial beside a plan is in none of its rows."""
    function = run.config.get("function") or {}
    codes = {t.function["code"] for t in plan.runs.values() if t.function}
    if codes and function.get("code") not in codes:
        row = f"{methods_as_text(run.config['methods'])}, seed {run.seed}"
        return f"a result of older code of {function.get('name')} ({row}); --ignore-code-change counts it"
    return "belongs to no configuration in plan.json: it was run under an earlier plan or other settings"


def _from_plan(
    folder: Path,
    plan: Comparison,
    by_id: Mapping[str, list[LoggedRun]],
    searches: Mapping[Path, dict[str, Any]],
) -> tuple[LoggedComparison, set[Path]]:
    used: set[Path] = set()

    def find(id: str) -> LoggedRun | None:
        runs = by_id.get(id, [])
        own = [
            r for r in runs if r.folder.parent == folder
        ] or runs  # a shared store of trials serves many plans
        used.update(r.folder for r in own[:1])
        return own[0] if own else None

    study = logged_comparison(plan, find)
    study.search = searches.get(folder, study.search)
    return study, used


def _from_runs(folder: Path, runs: list[LoggedRun]) -> LoggedComparison:
    """Trials without a plan: a row per set of methods, a grid point per learning rate."""
    configs: dict[str, Config] = {}
    several_rates = len({_rate(r) for r in runs}) > 1
    for run in sorted(runs, key=lambda r: (bool(r.config["methods"]), r.id)):
        name = methods_as_text(run.config["methods"])
        methods = run.config["methods"]
        config = configs.setdefault(name, Config(name, methods, [], baseline=not methods))
        grid = {"train.lr": _rate(run)} if several_rates else {}
        setting = next((s for s in config.settings if s.grid == grid), None)
        if setting is None:
            setting = Setting(grid, {}, model=run.config.get("model", {}))
            config.settings.append(setting)
        setting.logged[run.seed] = run
        setting.ids[run.seed] = run.id
    name = folder.resolve().name
    study = LoggedComparison(name, name, "", "max", list(configs.values()))
    study.judge_by(None)
    return study


def _rate(run: LoggedRun) -> float | None:
    """The learning rate; a training of the user's own has none that we know of."""
    out: float | None = run.config.get("train", {}).get("lr")
    return out


FREE = ("seed", "methods", "id", "sites")
"""What rows may differ in, beside the learning rate and the axes of the grid."""

DECLARED = ("model.", "train.", "data.augment", "pretrain", "function.params")
"""What the rows of a plan may differ in as well, because the plan says so."""

FACTS = ("examples.", "judged by", "content of the data")
"""What only a finished run knows."""


class ProtocolMismatch(LabError):
    """Runs that were trained or tested differently cannot stand in one table."""

    exit_code = 2


def protocol_of(run: LoggedRun, free: Iterable[str] = ()) -> dict[str, str]:
    """What must be equal for runs to be compared, flat, as text: data, model,
    training, size of the splits.

    Args:
        run: one run.
        free: further settings that may differ.
    """
    said = {
        k: v for k, v in run.config.items() if k not in FREE and v is not None
    }  # older runs know no pretraining
    flat = _flatten(said)
    if run.final:
        counts = run.final.data.get("examples", {})
        flat |= {f"examples.{k}": str(v) for k, v in counts.items()}
        if sums := run.final.data.get("sha256"):
            flat["content of the data"] = ", ".join(
                f"{k} {str(v)[:12]}" for k, v in sorted(sums.items())
            )
        if run.final.primary[
            0
        ]:  # a function that diverged before it returned anything names no metric
            flat["judged by"] = run.final.primary[0]
    for key in ("train.lr", *free):
        flat.pop(key, None)
    return flat


def check_protocol(
    name: str, runs: Sequence[LoggedRun], free: Iterable[str], planned: bool
) -> dict[str, str]:
    """What all runs share; raises ProtocolMismatch, naming every setting and its values, if they
    may not be mixed.

    Args:
        name: the name to use.
        runs: the runs of one table.
        free: further settings that may differ.
        planned: whether a plan names the rows.
    """
    flats = [protocol_of(run, free) for run in runs]
    lines = []
    for key in sorted({k for flat in flats for k in flat}):
        if planned and key.startswith(DECLARED):
            continue
        values = Counter(
            flat.get(key, "not set") for flat in flats if key in flat or not key.startswith(FACTS)
        )
        if len(values) > 1:
            shown = ", ".join(
                f"{value} in {n} run{'s' * (n > 1)}" for value, n in values.most_common()
            )
            lines.append(f"  - {key}: {shown}")
    if lines:
        raise ProtocolMismatch(
            f"{name} mixes incompatible protocols in one table:\n"
            + "\n".join(lines)
            + "\nReport them separately: keep each protocol in its own "
            "folder, or pass --split for one table each."
        )
    first = flats[0] if flats else {}
    return {k: v for k, v in first.items() if all(flat.get(k, v) == v for flat in flats)}


def protocol_groups(runs: Iterable[LoggedRun]) -> list[list[LoggedRun]]:
    """The runs, sorted into groups of one protocol each.

    Args:
        runs: the runs to sort.
    """
    groups: dict[str, list[LoggedRun]] = {}
    for run in runs:
        flat = {k: v for k, v in protocol_of(run).items() if not k.startswith(FACTS)}
        groups.setdefault(json.dumps(flat, sort_keys=True), []).append(run)
    return list(groups.values())


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} becomes {"a.b": "1"}."""
    if isinstance(value, Mapping):
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= _flatten(inner, f"{path}.{key}" if path else str(key))
        return flat
    return {path: value if isinstance(value, str) else json.dumps(value)}
