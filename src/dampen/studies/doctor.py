"""What is installed, which devices and kernels there are, which data sets were found, whether runs
can be written."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from dampen.native.library import cpu_name
from dampen.studies.environment import usable_cores, versions

NEEDED = {
    "torch": "",
    "numpy": "studies",
    "scipy": "studies",
    "scikit-learn": "studies",
    "lightning": "studies",
    "torchmetrics": "studies",
}
OPTIONAL = {
    "timm": "timm models (pip install 'dampen[timm]')",
    "transformers": "Hugging Face models (pip install 'dampen[hf]')",
    "ray": "the ray engine (pip install 'dampen[ray]')",
    "tokenizers": "translation and BPE language models",
    "sacrebleu": "BLEU",
    "tensorboard": "--tensorboard (pip install 'dampen[tensorboard]')",
}


State = Literal["ok", "optional", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it works, what was found, what to do."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    missing: bool = False  # not there, and nothing that is needed depends on it

    @property
    def state(self) -> State:
        """A problem needs a remedy; what is optional may stay missing."""
        if not self.ok:
            return "problem"
        return "optional" if self.missing else "ok"


def examine(data_dir: str | None = None, runs: Path = Path("runs")) -> list[Finding]:
    """Everything at once; nothing is changed.

    Args:
        data_dir: where data sets are looked for.
        runs: where runs are written.
    """
    return [
        *_packages(),
        *_devices(),
        _torchvision(),
        _attention(),
        _native(),
        *_data(data_dir),
        _disk(runs),
    ]


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """For programs: every finding with its state, and the closing sentence.

    Args:
        findings: what `examine` found.
    """
    plain = [{**asdict(f), "state": f.state} for f in findings]
    return {"ok": all(f.ok for f in findings), "summary": summary(findings), "findings": plain}


def summary(findings: list[Finding]) -> str:
    """The closing sentence.

    Args:
        findings: what `examine` found.
    """
    problems = [f.what for f in findings if f.state == "problem"]
    missing = sum(f.state == "optional" for f in findings)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return f"{count} to solve: {', '.join(problems)}."
    if missing:
        parts = "1 optional part is" if missing == 1 else f"{missing} optional parts are"
        return f"Everything that is needed works; {parts} missing."
    return "Everything works."


def _packages() -> list[Finding]:
    found = versions()
    lines = []
    for name, extra in NEEDED.items():
        version = found.get(name) or _version(name)
        remedy = f"pip install 'dampen[{extra}]'" if extra else "pip install torch"
        lines.append(
            Finding(name, version is not None, version or "missing", "" if version else remedy)
        )
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        found_as = version or f"not installed; only for {purpose}"
        lines.append(Finding(name, True, found_as, missing=version is None))
    return lines


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    import torch

    lines = [
        Finding(
            "processor",
            True,
            f"{cpu_name()}, {usable_cores()} usable cores, {torch.get_num_threads()} threads",
        )
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        lines.append(Finding("CUDA", True, ", ".join(names)))
    else:
        lines.append(Finding("CUDA", True, "none; training runs on the CPU", missing=True))
    mps = torch.backends.mps.is_available()
    lines.append(Finding("MPS", True, "yes" if mps else "none", missing=not mps))
    compiler = shutil.which("g++") or shutil.which("clang++")
    name = compiler and Path(compiler).name
    needed = "none: torch.compile on the CPU and the native kernels need a C++ compiler"
    lines.append(Finding("compiler", True, name or needed, missing=not compiler))
    return lines


def _torchvision() -> Finding:
    from dampen._torch import declare_torchvision_operators

    if importlib.util.find_spec("torchvision") is None:
        purpose = "crop, CutMix, RandAugment and its like (pip install 'dampen[augment]'), timm and object detection"
        return Finding("torchvision", True, f"not installed; only for {purpose}", missing=True)
    declared = declare_torchvision_operators()
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        return Finding(
            "torchvision",
            False,
            f"cannot be imported: {error}",
            "pip install torchvision, built for your torch",
        )
    how = (
        "its compiled extension does not load with this torch; with "
        "a workaround, all that dampen needs works"
        if declared
        else "works"
    )
    return Finding("torchvision", True, f"{torchvision.__version__}: {how}")


def _attention() -> Finding:
    """Run the fused kernel once and compare it with the plain formula."""
    import torch
    from torch.nn import functional as F

    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
    plain = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
    error = (F.scaled_dot_product_attention(q, k, v) - plain).abs().max().item()
    return Finding(
        "fused attention",
        error < 1e-5,
        f"agrees with the plain formula to {error:.0e}",
        "" if error < 1e-5 else "reinstall torch",
    )


def _native() -> Finding:
    from dampen.native import available, status

    there = available()
    remedy = "" if there else "dampen doctor --build"
    return Finding("native kernels", True, status(), remedy, missing=not there)


FORMATS = (
    "folder",
    "table",
    "image_arrays",
    "feature_arrays",
    "hub_text",
    "hub_images",
    "function",
)
"""Formats of the user's own data, which nobody can fetch."""


def try_gpu(path: Path) -> list[Finding]:
    """Compare every form of the GPU kernels with dense attention, and write a file to send in.

    Args:
        path: of the file.
    """
    import torch

    from dampen.kernels.triton import trial
    from dampen.studies.files import write_json

    if why := trial.missing():
        return [Finding("GPU kernels", True, f"not used: {why}; attention runs on torch")]
    if not torch.cuda.is_available():
        return [Finding("GPU kernels", True, "not used: torch finds no GPU")]
    report = trial.report(torch.device("cuda", torch.cuda.current_device()))
    write_json(path, report)
    wrong = {form: why for form, why in report["forms"].items() if why != "ok"}
    told = "; ".join(f"{form}: {why}" for form, why in list(wrong.items())[:3])
    forms = len(report["forms"])
    found = f"{report['card']}: {forms - len(wrong)} of {forms} forms agree with dense attention"
    remedy = f"those run on torch ({told}). Please send in {path}" if wrong else ""
    return [Finding("GPU kernels", not wrong, f"{found} (written to {path})", remedy)]


def _data(data_dir: str | None) -> list[Finding]:
    """Data sets that have a name of their own; formats of the user's files are none."""
    from dampen.studies.data import list_data

    return [
        Finding(
            f"data {d['name']}",
            True,
            str(d["found"]) if d["found"] else "not found",
            "" if d["found"] else f"dampen data get {d['name']}",
            missing=not d["found"],
        )
        for d in list_data(data_dir)
        if d["found"] or d["name"] not in FORMATS
    ]


def _disk(runs: Path) -> Finding:
    place = runs.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    return Finding(
        "disk", free > 1, f"{free:.1f} GB free for {runs}", "" if free > 1 else "free some space"
    )
