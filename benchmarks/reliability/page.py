"""docs/reliability.md, from the record alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import mutation

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = (
    ROOT / "benchmarks" / "records" / "reliability.json",
    ROOT / "docs" / "reliability.md",
)
MUTATION = mutation.RECORD
MUTANTS = """## Small errors that the tests notice

`python -m benchmarks.mutation` changes one thing at a time in the modules where an error would be silent (another
comparison, number, operator or constant; cosmic-ray's operators, a sample with a fixed seed) and runs the tests that
mirror the module. The score is the share of sampled mutants that a test notices, without those that no test could tell
from the original; each of these is listed with the reason.
"""
BAD = ("lost", "wrong", "tracebacks", "hangs")
KNOWN = (*BAD, "what", "asked", "full", "repetitions", "seconds", "processor", "environment")
HEAD = """# Fault-injection tests

<!-- Generated from `benchmarks/records/reliability.json` by `python -m benchmarks.reliability --page`. -->

`python -m benchmarks.reliability` attacks dampen and counts what happens. It takes minutes. `--full` takes hours and
repeats each attack as often as the last column says. Every attacked run is trained to its end and compared, to the last
bit, with one that was left alone. The goal is 0 in each of the four columns in the middle. Random points have a fixed
seed.

| attack | repetitions | lost | wrong | tracebacks | hangs | also counted | with `--full` |
|---|---|---|---|---|---|---|---|
"""


def page(record: dict[str, Any], attacks: Sequence[str]) -> str:
    """The whole page; `attacks` names all there are, so that what is not in the record is said."""
    lines = []
    for name, row in record["attacks"].items():
        other = "; ".join(f"{k}: {_number(v)}" for k, v in row.items() if k not in KNOWN)
        bad = " | ".join(str(row.get(key, 0)) for key in BAD)
        done = _number(row.get("repetitions", 0))
        lines.append(f"| {name} ({row['what']}) | {done} | {bad} | {other} | {_full(row)} |")
    missing = [name for name in attacks if name not in record["attacks"]]
    machines = sorted({_machine(row["environment"]) for row in record["attacks"].values()})
    told = ["", f"Measured on {'; '.join(machines)}."]
    if missing:
        told += ["", f"Not in this record: {', '.join(missing)}."]
    if MUTATION.exists():
        told += ["", MUTANTS, *mutation.table(json.loads(MUTATION.read_text(encoding="utf-8")))]
    return HEAD + "\n".join([*lines, *told]) + "\n"


def _full(row: dict[str, Any]) -> str:
    if row["asked"] < row["full"]:
        return _number(row["full"])
    return (
        "done"
        if row.get("repetitions", 0) >= row["full"]
        else f"{_number(row['full'])}, ended by time"
    )


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _machine(environment: dict[str, Any]) -> str:
    torch = environment["packages"]["torch"]
    return f"{environment['cpu']}, {environment['cores']} cores, torch {torch}, {environment['time'][:10]}"
