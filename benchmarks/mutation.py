"""How many small errors the tests notice: `python -m benchmarks.mutation` (needs `pip install cosmic-ray`; minutes).

cosmic-ray's operators make mutants (another comparison, number, operator, break for continue, ...) of a few modules, a
sample with a fixed seed runs against the tests that mirror its module, and a mutant that no test notices survives. A
mutant lies in a copy of the source, never in the source itself. Importing torch takes seconds, so one process imports
it and every mutant runs in a fork of that process. The record is benchmarks/records/mutation.json; `--survivors` runs
those of the record again, after tests were added.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, RECORD = ROOT / "src", ROOT / "benchmarks" / "records" / "mutation.json"
SECONDS = 900
"""The longest that the tests of one mutant may take on the clock; what loops for ever ends by its processor time."""
PRELOAD = (
    "torch",
    "scipy.stats",
    "sklearn.datasets",
    "lightning.fabric.strategies",
    "torchmetrics.classification",
)


@dataclass(frozen=True)
class Module:
    """What is mutated together, and the tests that should notice, the quickest first."""

    files: str  # below src/dampen, a pattern
    tests: tuple[str, ...]


MODULES = {
    "masks": Module("masks.py", ("test_masks.py",)),
    "kernels": Module(
        "kernels/[ckl]*.py",
        ("kernels/test_attention.py", "kernels/test_blocks_of_queries.py", "native/test_native.py"),
    ),
    "attend": Module(
        "kernels/attend.py", ("kernels/test_attention.py", "kernels/test_blocks_of_queries.py")
    ),
    "explicit": Module(
        "functional/explicit/*.py", ("functional/explicit", "methods/test_explicit_dropout.py")
    ),
    "handle": Module(
        "handle.py", ("test_handle.py", "test_handle_modes.py", "calls/test_ledger.py")
    ),
    "stats": Module("studies/stats.py", ("studies/records/test_stats.py",)),
    "record": Module(
        "studies/store.py", ("studies/records/test_record.py", "studies/records/test_damage.py")
    ),
    "checkpoint": Module(
        "studies/trainer/checkpoint.py",
        (
            "studies/records/test_record.py",
            "studies/engines/test_survivors.py",
            "studies/trainer/test_resume.py",
        ),
    ),
}


EQUIVALENT = {
    ("studies/stats.py", "[True] * m"): "every entry is written before it is read",
    ("studies/stats.py", "[ 1.0] * len(p_values)"): "every entry is written before it is read",
    ("masks.py", "(width - 1) // 1"): "more padding behind the window than anything reads",
    ("studies/trainer/checkpoint.py", "if match else - 2"): "only names that match are sorted",
    (
        "kernels/attend.py",
        "len(leading) > 1:",
    ): "the mask is expanded, as a view with the same values",
    (
        "kernels/attend.py",
        "mask.ndim > 2 or len",
    ): "the mask is expanded, as a view with the same values",
}
"""(file, a part of the mutated line) -> why no test could tell it from the original."""


@dataclass(frozen=True)
class Mutant:
    """One change: the operator's name and the number of its place in the file say which."""

    file: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], choices=list(MODULES), help="this module; repeatable"
    )
    parser.add_argument("--count", type=int, default=15, help="mutants per module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--survivors", action="store_true", help="only the survivors of the record, again"
    )
    options = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        _prepare(copy)
        for name in options.only or MODULES:
            if options.survivors:
                entry = record[name]
                mutants = [Mutant(**m) for m in entry["survived"]]
            else:
                mutants, possible = _sampled(
                    MODULES[name], options.count, random.Random(options.seed)
                )
                entry = {
                    "possible": possible,
                    "seed": options.seed,
                    "sampled": len(mutants),
                    "killed": 0,
                    "by time": 0,
                }
            record[name] = {**entry, **_attacked(MODULES[name], mutants, copy, entry)}
            RECORD.write_text(
                json.dumps({n: record[n] for n in MODULES if n in record}, indent=1) + "\n"
            )
            print(
                name,
                {k: v for k, v in record[name].items() if k != "survived"},
                file=sys.stderr,
                flush=True,
            )
    return 0


def table(record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The record as Markdown: a row for each module, and a line for each mutant that no test noticed.

    Args:
        record: of this command.
    """
    lines, listed = [], []
    for name, row in record.items():
        why = [_equivalent(m) for m in row["survived"]]
        same, noticed = sum(map(bool, why)), row["killed"] + row["by time"]
        left = row["sampled"] - same - noticed
        counts = f"{row['possible']:,} | {row['sampled']} | {noticed} | {same} | {left}"
        lines.append(f"| {name} | {counts} |")
        for m, reason in zip(row["survived"], why, strict=True):
            change = f"`{m['file']}`: `{m['before']}` to `{m['after']}`".replace("|", "\\|")
            listed.append(f"- {change}: {reason or 'not noticed'}")
    return lines, listed


def _equivalent(mutant: dict[str, Any]) -> str:
    return next(
        (
            w
            for (f, part), w in EQUIVALENT.items()
            if f == mutant["file"] and part in mutant["after"]
        ),
        "",
    )


def _prepare(copy: Path) -> None:
    """Make this process what every mutant is forked from: torch and its friends are there, of dampen the front door of
    the copy alone."""
    sys.dont_write_bytecode = True
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")]),
        PYTHONDONTWRITEBYTECODE="1",
    )
    sys.path[:0] = [str(copy), str(ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] == "dampen"]:
        del sys.modules[name]
    importlib.import_module("dampen._torch").declare_torchvision_operators()
    for name in PRELOAD:
        importlib.import_module(name)


def _attacked(
    module: Module, mutants: list[Mutant], copy: Path, before: dict[str, Any]
) -> dict[str, Any]:
    """Run the tests without a mutant, then against each; the counts go on from those of `before`."""
    began = time.process_time()
    fate, spent = _tested(module, None, copy, 10_000)
    if fate != "survived":
        print((copy.parent / "output").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(
            f"The tests {', '.join(module.tests)} do not pass without a mutant; mend them first."
        )
    killed, late, survived = before["killed"], before["by time"], []
    for mutant in mutants:
        fate, _ = _tested(module, mutant, copy, 10 * spent + 30)
        killed, late = killed + (fate == "killed"), late + (fate == "by time")
        survived += [asdict(mutant)] if fate == "survived" else []
        print(
            f"{fate:9} {mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}",
            file=sys.stderr,
            flush=True,
        )
    minutes = (time.process_time() - began) / 60
    return {
        "killed": killed,
        "by time": late,
        "survived": survived,
        "minutes of the parent": round(minutes, 1),
    }


def _tested(
    module: Module, mutant: Mutant | None, copy: Path, processor: float
) -> tuple[str, float]:
    """What became of a mutant, and the processor time of its tests."""
    path = copy / "dampen" / mutant.file if mutant else None
    whole = path.read_text() if path else ""
    if mutant and path:
        changed = _mutate(whole, mutant.operator, mutant.occurrence)
        if changed is None or changed == whole:
            raise SystemExit(f"{mutant} is not in the source any more; sample again.")
        path.write_text(changed)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        child = os.fork()
        if not child:
            _run_tests(module, processor, copy)
        status = _waited(child)
    finally:
        if path:
            path.write_text(whole)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "by time", spent
    return ("survived" if status == 0 else "killed"), spent


def _run_tests(module: Module, processor: float, copy: Path) -> None:
    """The life of the fork, with the tests and the module's own examples; never returns."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(processor), int(processor) + 10))
    quiet = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(ROOT)
    code = 99
    try:
        import pytest
        from hypothesis import settings

        settings.register_profile(
            "mutants", deadline=None
        )  # a busy machine must not pass for a test that noticed
        settings.load_profile("mutants")
        tests = [
            *sorted((copy / "dampen").glob(module.files)),
            *(ROOT / "tests" / name for name in module.tests),
        ]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed=0"]
        options += [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # plugins that were imported before the fork
        code = int(pytest.main([*options, *map(str, tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int) -> int | None:
    """The status of a fork that ended; None for one that had to be ended, with all that it started."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _sampled(module: Module, count: int, rng: random.Random) -> tuple[list[Mutant], int]:
    """`count` mutants, each at another place of the code, and how many there could be."""
    places: dict[tuple[str, Any], list[tuple[str, int]]] = {}
    for path in sorted((SOURCE / "dampen").glob(module.files)):
        for operator, occurrence, place in _possible(path.read_text()):
            places.setdefault((str(path.relative_to(SOURCE / "dampen")), place), []).append(
                (operator, occurrence)
            )
    chosen: list[Mutant] = []
    for file, place in rng.sample(sorted(places), len(places)):
        operator, occurrence = rng.choice(places[file, place])
        source = (SOURCE / "dampen" / file).read_text()
        changed = _mutate(source, operator, occurrence)
        if changed is not None and _meaning(changed) != _meaning(source):
            line = place[0][0]
            was, now = source.splitlines()[line - 1].strip(), changed.splitlines()[line - 1].strip()
            chosen.append(Mutant(file, operator, occurrence, line, was, now))
        if len(chosen) == count:
            break
    return chosen, sum(map(len, places.values()))


def _possible(source: str) -> Iterator[tuple[str, int, Any]]:
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(source)))
    for name in plugins.operator_names():
        if plugins.get_operator(name).arguments():
            continue
        operator = plugins.get_operator(name)()
        for occurrence, place in enumerate(
            p for node in nodes for p in operator.mutation_positions(node)
        ):
            yield name, occurrence, place


def _mutate(source: str, operator: str, occurrence: int) -> str | None:
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    changed: str | None = mutate_code(source, plugins.get_operator(operator)(), occurrence)
    return changed


def _meaning(source: str) -> str:
    """The code without what never runs: types of arguments and results, docstrings. A mutant of those is none."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            for inner in ast.walk(node):
                if isinstance(inner, ast.AnnAssign):
                    inner.annotation = ast.Constant(None)
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


if __name__ == "__main__":
    sys.exit(main())
