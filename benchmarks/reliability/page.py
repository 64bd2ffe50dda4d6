"""docs/reliability.md, from the record alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "benchmarks" / "records" / "reliability.json", ROOT / "docs" / "reliability.md"
BAD = ("lost", "wrong", "tracebacks", "hangs")
KNOWN = (*BAD, "what", "asked", "full", "repetitions", "seconds", "processor", "environment")
HEAD = """# Hard to break

What happened when dampen was attacked, counted by `python -m benchmarks.reliability` (minutes; `--full` takes hours and
repeats each attack as often as the last column says). Every attacked trial is run to its end and compared, to the last
bit, with one that was left alone. The goal is 0 in each of the four columns in the middle. Random points have a fixed
seed. This page is written from `benchmarks/records/reliability.json` by `python -m benchmarks.reliability --page`.

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
    return HEAD + "\n".join([*lines, *told]) + "\n"


def _full(row: dict[str, Any]) -> str:
    if row["asked"] < row["full"]:
        return _number(row["full"])
    return "done" if row.get("repetitions", 0) >= row["full"] else f"{_number(row['full'])}, ended by time"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _machine(environment: dict[str, Any]) -> str:
    torch = environment["packages"]["torch"]
    return f"{environment['cpu']}, {environment['cores']} cores, torch {torch}, {environment['time'][:10]}"
