"""docs/reliability.md, from the records alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import mutation, native_fuzz, native_mutation

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = (
    ROOT / "benchmarks" / "records" / "reliability.json",
    ROOT / "docs" / "reliability.md",
)
BAD = ("lost", "wrong", "tracebacks", "hangs")
FUZZED = 100_000
"""Cases of the native fuzzer that `make full` runs under each kind of watch."""
HEAD = """# Fault-injection tests

dampen was attacked in the ways below. Every attacked run is continued to its end and compared, to the last bit, with
an undisturbed one. A repetition fails if a run is lost, its result is wrong, a traceback appears, or something hangs.
The points of attack are random with a fixed seed. `python -m benchmarks.reliability --full` repeats all of it in hours.

| attack | repetitions | of planned | failed |
|---|---|---|---|
"""
NATIVE = """## Native kernels

`python -m benchmarks.native_fuzz` compares random calls with float64: shapes, {layouts} memory layouts, dtypes, masks,
default dtypes and devices, forward, backward and second derivatives. "Guarded memory" puts an unreadable page behind
every tensor. "Sanitizers" are AddressSanitizer and UndefinedBehaviorSanitizer. `make test` runs 2,000 cases,
`make full` all planned ones. z compares the number of hidden keys with the rates.

| run | cases | of planned | wrong | crashes | z |
|---|---|---|---|---|---|
"""
ADDED = (
    (
        "hostile training functions",
        "no run affects another, and the failing line is named, with Ray too",
        "tests/studies/study/test_hostile_functions.py",
    ),
    (
        "inductor over 12 sequence lengths",
        "one graph for all lengths. `make test` tries DropKey, `make full` every method",
        "tests/checking/test_inductor_shapes.py",
    ),
    (
        "full disk while the report is written",
        "the earlier page stays whole",
        "tests/studies/trainer/test_full_disk.py",
    ),
    (
        "file system without locks",
        "refused with the reason",
        "tests/studies/records/test_record.py",
    ),
    ("clock set back or forward", "no effect, see clock jumps above", ""),
    ("row strides above 2^31", "computed by torch, {strides} fuzzed cases", ""),
    (
        "scores that tie in hard masking",
        "one wrong gradient in 7,500 fuzzed cases. Mended",
        "tests/native/test_ties.py",
    ),
    (
        "bytecode, compiled modules and folders in place of approved code",
        "code ran that nobody had approved. Mended",
        "tests/studies/study/test_approved_code.py",
    ),
    (
        "`dampen.silence` after a failing hook, and in threads",
        "dropout acted. Mended",
        "tests/audit/test_silence.py",
    ),
    (
        "`optimizer.step()` while the model carries averaged weights",
        "the step was undone silently. Now an error",
        "tests/methods/test_weight_average.py",
    ),
    ("known vulnerabilities of the dependencies", "not run: `pip-audit` needs the network", ""),
)
"""What was attacked in this version beside the tables above: the attack, what happened, and the test."""
MUTANTS = """## Mutation tests

`python -m benchmarks.mutation` and `python -m benchmarks.native_mutation` change one comparison, number or operator at
a time and run the tests of that module. The mutants are a sample with a fixed seed. Equivalent mutants compute the same
as the original. The rows of Python modules were measured on version 0.2.

| code | possible mutants | sampled | noticed | equivalent | survived |
|---|---|---|---|---|---|
"""


def page(record: dict[str, Any], attacks: Sequence[str]) -> str:
    """The whole page.

    Args:
        record: of `python -m benchmarks.reliability`.
        attacks: the names of all attacks, so that what is not in the record is named.
    """
    lines = []
    for name, row in record["attacks"].items():
        done, failed = row.get("repetitions", 0), sum(row.get(key, 0) for key in BAD)
        planned = "all" if done >= row["full"] else f"{row['full']:,}"
        lines.append(f"| {name}: {row['what']} | {done:,} | {planned} | {failed} |")
    machines = sorted({_machine(row["environment"]) for row in record["attacks"].values()})
    lines += ["", f"Measured on {'; '.join(machines)}."]
    if missing := [name for name in attacks if name not in record["attacks"]]:
        lines += ["", f"Not in this record: {', '.join(missing)}."]
    fuzzed = json.loads(native_fuzz.RECORD.read_text(encoding="utf-8"))
    strides = sum(r["counts"]["runs"].get("layout: gigabytes apart", 0) for r in fuzzed.values())
    native = [NATIVE.format(layouts=len(native_fuzz.LAYOUTS)) + "\n".join(_fuzzed(fuzzed)), ""]
    native += [
        "## Attacks added in this version",
        "",
        "| attack | result | test |",
        "|---|---|---|",
    ]
    for attack, result, test in ADDED:
        result = result.format(strides=f"{strides:,}")
        native.append(f"| {attack} | {result} | {f'`{test}`' if test else ''} |")
    native.append("")
    return HEAD + "\n".join([*lines, "", *native, MUTANTS + "\n".join(_mutants())]) + "\n"


def _fuzzed(record: dict[str, Any]) -> list[str]:
    lines = []
    for how, name in (("guarded", "guarded memory"), ("sanitized", "sanitizers")):
        row = record[how]
        planned = "all" if row["cases"] >= FUZZED else f"{FUZZED:,}"
        failed = f"{len(row['counts']['failed'])} | {len(row['crashes'])}"
        lines.append(f"| {name} | {row['cases']:,} | {planned} | {failed} | {row['z']:.1f} |")
    return lines


def _mutants() -> list[str]:
    """A row for each module and for the C++, and below them the survivors with the reason."""
    python = json.loads(mutation.RECORD.read_text(encoding="utf-8"))
    lines, listed = mutation.table(python)
    row, survivors = native_mutation.table(
        json.loads(native_mutation.RECORD.read_text(encoding="utf-8"))
    )
    fold = ["", '<details markdown="1"><summary>Equivalent mutants and survivors</summary>', ""]
    return [*lines, row, *fold, *listed, *survivors, "", "</details>"]


def _machine(environment: dict[str, Any]) -> str:
    torch = environment["packages"]["torch"]
    return f"{environment['cpu']}, {environment['cores']} cores, torch {torch}, {environment['time'][:10]}"
