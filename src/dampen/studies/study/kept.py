"""What a study needs beside its plan, kept in its folder, so that a study opened from disk can go on: the user's own
function, or where their model and data are."""

from __future__ import annotations

import base64
from dataclasses import fields
from pathlib import Path
from typing import Any

from dampen.studies.config.code import Code, digest_of_file, local_files, package_root
from dampen.studies.config.plan import Comparison
from dampen.studies.errors import LabError
from dampen.studies.files import read_json, write_json
from dampen.studies.records.fingerprint import fingerprint
from dampen.studies.trainer.function import Function
from dampen.studies.trainer.parts import Parts

FILE = "function.json"
PARTS = "parts.json"


def save_function(function: Function, folder: Path) -> None:
    """Write where the function is, or the function itself where it has no file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, _plain(function))


def load_function(folder: Path) -> Function:
    """Read it back. A function that was kept by value is unpickled when a trial runs, as it was the first time."""
    if not (folder / FILE).exists():
        raise LabError(f"{folder} does not say where its function is. Call dampen.compare with it again.")
    return _function(read_json(folder / FILE))


def save_parts(parts: Parts, folder: Path, data_dir: str | None = None) -> None:
    """Write where the user's own model and data are, and in which folder official sets were looked for."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {k: _plain(v) if isinstance(v, Function) else v for k, v in _shallow(parts).items()}
    write_json(folder / PARTS, places | {"data_dir": str(Path(data_dir).resolve()) if data_dir else None})


def load_parts(folder: Path, plan: Comparison) -> tuple[Parts, str | None]:
    """Read them back, with the folder of official sets; raise where they are no longer what the study was run on."""
    sections = [section for trial in plan.trials.values() for section in (trial.data, trial.model)]
    if not (folder / PARTS).exists():
        if any("fingerprint" in section or "code" in section for section in sections):
            raise LabError(f"{folder} does not say where its data and model are. Call dampen.compare again.")
        return Parts(), None
    kept = read_json(folder / PARTS)
    data_dir = kept.pop("data_dir", None)
    parts = Parts(kept["data"], _maybe(kept["read"]), kept["model"], _maybe(kept["build"]))
    for trial in plan.trials.values():
        _check(parts.data, trial.data.get("fingerprint"), "data")
        _check(parts.model, trial.model.get("fingerprint"), "model")
    return parts, data_dir


def _check(place: str | None, planned: str | None, what: str) -> None:
    """The place must be there, with the content that the trials are known by."""
    if place is None or planned is None:
        return
    if not Path(place).exists():
        raise LabError(f"The {what} of this study is no longer at {place}. Call dampen.compare with its new place.")
    if (found := fingerprint(place)) != planned:
        raise LabError(
            f"The {what} at {place} has changed since this study was run (fingerprint {found}, not {planned}), so more "
            "of it would be another study. Call dampen.compare with it: other data makes other trials."
        )


def _shallow(parts: Parts) -> dict[str, Any]:
    return {field.name: getattr(parts, field.name) for field in fields(parts)}


def _plain(function: Function) -> dict[str, Any]:
    return {
        "name": function.code.name,
        "code": function.code.digest,
        "file": function.file,
        "attribute": function.attribute,
        "pickled": _text(function.pickled) if function.pickled else None,
        "objects": {k: _text(v) for k, v in function.objects.items()},
        "metric": list(function.metric) if function.metric else None,
    }


def _maybe(kept: dict[str, Any] | None) -> Function | None:
    return _function(kept) if kept is not None else None


def _function(kept: dict[str, Any]) -> Function:
    file = Path(kept["file"]) if kept["file"] else None
    if file is not None and not file.is_file():
        raise LabError(f"The function {kept['name']} is no longer at {file}. Call dampen.compare with it again.")
    code = Code(kept["name"], kept["code"])
    if file is not None:
        if digest_of_file(file) != kept["code"]:
            raise LabError(
                f"The code of {kept['name']} has changed since this study was run, so more of it would be another "
                "study. Call dampen.compare with it: it runs new trials, or takes the old ones with same_code=True."
            )
        code = Code(kept["name"], kept["code"], package_root(file), local_files(file))
    objects = {k: base64.b64decode(v) for k, v in kept["objects"].items()}
    pickled = base64.b64decode(kept["pickled"]) if kept["pickled"] else None
    metric = (kept["metric"][0], kept["metric"][1]) if kept["metric"] else None
    return Function(code, kept["file"], kept["attribute"], pickled, objects, {}, metric)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
