"""Whether the tests notice small errors in the C++ of each native kernel.

    python -m benchmarks.native_mutation [--count 6] [--seed 0] [--jobs 1]

A mutant changes one operator or number in one line of one file. It is compiled from a copy of the source, and then has
to pass 250 cases of the fuzzer and the tests in `tests/native`. The record is `benchmarks/records/native_mutation.json`.
The same command continues an interrupted record.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dampen.native import library
from dampen.studies.files import write_json

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "native_mutation.json"
CASES = 250
TESTS = ("test_native.py", "test_entry.py", "test_tap.py", "test_ties.py")
SECONDS = 1200
"""On the clock, for one mutant: one that does not end by then is noticed."""
CHANGES = {
    r"(?<= )\+(?= )": "-",
    r"(?<= )-(?= )": "+",
    r"(?<= )\*(?= )": "/",
    r"(?<= )<(?= )": "<=",
    r"(?<= )>(?= )": ">=",
    r"(?<= )<=(?= )": "<",
    r"(?<= )>=(?= )": ">",
    r"(?<= )==(?= )": "!=",
    r"(?<= )!=(?= )": "==",
    r"(?<= )&&(?= )": "||",
    r"(?<= )\|\|(?= )": "&&",
    r"(?<= )\+=(?= )": "-=",
    r"\b0\b(?!\.)": "1",
    r"\b1\b(?!\.)": "2",
    r"\b16\b": "8",
}
EQUIVALENT = {
    "is_small = std::max({p.M, p.D, p.E}) < SMALL": "another way to the same numbers at one size",
    "i64 step = 1;": "written before it is read",
}
"""A part of a mutated line -> why no test could tell it from the original."""


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    line: int
    before: str
    after: str


def possible(path: Path) -> list[Mutant]:
    """Every change of a file; none in comments, includes, pragmas and messages."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code = line.split("//")[0]
        if not code.strip() or code.lstrip().startswith("#") or '"' in code:
            continue
        for pattern, other in CHANGES.items():
            for match in re.finditer(pattern, code):
                after = code[: match.start()] + other + code[match.end() :] + line[len(code) :]
                found.append(Mutant(path.name, number, line, after))
    return found


def sample(count: int, seed: int) -> list[Mutant]:
    """So many mutants of each file, each in another line where there are enough."""
    chosen = []
    for path in library.sources():
        draw, lines = random.Random(f"{seed} {path.name}"), set[int]()
        mutants = possible(path)
        for mutant in draw.sample(mutants, len(mutants)):
            if len(lines) < count and mutant.line not in lines:
                lines.add(mutant.line)
                chosen.append(mutant)
    return chosen


def fate(mutant: Mutant) -> str:
    """What became of a mutant: 'does not compile', 'noticed by ...', 'survived'."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "fate")
        child = os.fork()
        if not child:
            _try(mutant, Path(folder), said)
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                return "noticed by time"
            time.sleep(0.1)
        if os.WIFSIGNALED(ended[1]):
            return f"noticed by signal {os.WTERMSIG(ended[1])}"
        return said.read_text() if said.exists() else "noticed by an exit"


def _try(mutant: Mutant, folder: Path, said: Path) -> None:
    """The life of the fork; never returns."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (300, 310))
    quiet = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ.update(DAMPEN_CACHE=str(folder / "cache"), DAMPEN_NATIVE_FLAGS="-O1")
    copy = folder / "native"
    shutil.copytree(library.SOURCE.parent, copy)
    lines = (copy / mutant.file).read_text(encoding="utf-8").splitlines()
    lines[mutant.line - 1] = mutant.after
    (copy / mutant.file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    library.SOURCE = copy / library.SOURCE.name
    try:
        said.write_text(_judge())
    finally:
        os._exit(0)


def _judge() -> str:
    import pytest

    from benchmarks import native_fuzz

    try:
        library.build()
    except library.BuildError as error:
        if "was killed" in str(error) or "error:" in str(error):
            return "does not compile"
        return "noticed when it was built"
    counts = native_fuzz.run(CASES)
    if counts.failed or abs(counts.z()) > 5:
        return "noticed by the fuzzer"
    os.chdir(ROOT)
    tests = [str(ROOT / "tests" / "native" / name) for name in TESTS]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", *tests])
    return "noticed by the tests" if code else "survived"


def table(record: dict[str, Any]) -> tuple[str, list[str]]:
    """The record as Markdown: one row, and a line for each mutant that was not noticed.

    Args:
        record: of this command.
    """
    left = [m["mutant"] for m in record["mutants"] if m["fate"] == "survived"]
    made = [m for m in record["mutants"] if m["fate"] != "does not compile"]
    why = [next((w for part, w in EQUIVALENT.items() if part in m["after"]), "") for m in left]
    same = sum(map(bool, why))
    counts = f"{len(made)} | {len(made) - len(left)} | {same} | {len(left) - same}"
    listed = [
        f"- `native/{m['file']}`: `{m['before'].strip()}` to `{m['after'].strip()}`: {w or 'not noticed'}"
        for m, w in zip(left, why, strict=True)
    ]
    return f"| `native/*` (C++) | {sum(record['possible'].values()):,} | {counts} |", listed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=6, help="mutants per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    options = parser.parse_args()
    import torch

    from benchmarks import native_fuzz  # noqa: F401 - every fork needs them

    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    done = {Mutant(**m["mutant"]): m["fate"] for m in record.get("mutants", [])}
    left = [m for m in sample(options.count, options.seed) if m not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        tried = {pool.submit(fate, mutant): mutant for mutant in left}
        for future in as_completed(tried):
            mutant = tried[future]
            done[mutant] = future.result()
            print(f"{done[mutant]}: {mutant.file}:{mutant.line} {mutant.after.strip()}", flush=True)
            rows = [{"mutant": asdict(m), "fate": f} for m, f in done.items()]
            possible_ones = {p.name: len(possible(p)) for p in library.sources()}
            write_json(RECORD, {"cases": CASES, "possible": possible_ones, "mutants": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
