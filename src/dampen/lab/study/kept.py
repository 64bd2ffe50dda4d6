"""The function of a study, kept in its folder, so that a study opened from disk can go on."""

from __future__ import annotations

import base64
from pathlib import Path

from dampen.lab.config.code import Code, digest_of_file, local_files, package_root
from dampen.lab.errors import LabError
from dampen.lab.files import read_json, write_json
from dampen.lab.training.function import Function

FILE = "function.json"


def save_function(function: Function, folder: Path) -> None:
    """Write where the function is, or the function itself where it has no file."""
    write_json(
        folder / FILE,
        {
            "name": function.code.name,
            "code": function.code.digest,
            "file": function.file,
            "attribute": function.attribute,
            "pickled": _text(function.pickled) if function.pickled else None,
            "objects": {k: _text(v) for k, v in function.objects.items()},
            "metric": list(function.metric) if function.metric else None,
        },
    )


def load_function(folder: Path) -> Function:
    """Read it back. A function that was kept by value is unpickled when a trial runs, as it was the first time."""
    if not (folder / FILE).exists():
        raise LabError(f"{folder} does not say where its function is. Call dampen.compare with it again.")
    kept = read_json(folder / FILE)
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
