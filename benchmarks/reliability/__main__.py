"""The command: `python -m benchmarks.reliability`; see the package."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import reliability
from benchmarks.reliability import disks, fuzz, hardships, kills, memory, parsers, pickles, readers
from benchmarks.reliability.page import PAGE, RECORD, page
from benchmarks.reliability.subject import CannotAttack, Tally, patience
from dampen.studies.environment import describe
from dampen.studies.files import read_json, write_json


class Attack(NamedTuple):
    """What is done, how often by default and with --full, and how it is described."""

    do: Callable[[int, Path, random.Random], Tally]
    usual: int
    full: int
    what: str


ATTACKS = {
    "fuzzed pickles": Attack(
        lambda n, where, rng: pickles.attack(n, where),
        100_000,
        1_000_000,
        "atheris, which follows the code it reaches",
    ),
    "fuzzed command lines and recipes": Attack(
        parsers.attack, 500, 100_000, "each of four, near the grammar"
    ),
    "fuzzed contents": Attack(fuzz.formats, 2000, 100_000, "each of eleven formats"),
    "fuzzed files": Attack(readers.attack, 10, 100_000, "each of 23 readers of a data set, whole"),
    "full disk": Attack(disks.full, 15, 50, "a real tmpfs, full at a random point"),
    "power cuts": Attack(
        disks.power_cuts, 20, 200, "what was not synced is cut or zeroed, renames undone"
    ),
    "two processes on one folder": Attack(hardships.two_at_once, 10, 50, "started together"),
    "clock jumps": Attack(hardships.clock_jumps, 10, 50, "by up to ten years, at every step"),
    "kills of a trial": Attack(kills.of_a_trial, 20, 200, "SIGKILL at a random moment"),
    "kills of local workers": Attack(
        partial(kills.of_workers, engine="local"), 10, 200, "SIGKILL at a random step"
    ),
    "kills of Ray workers": Attack(
        partial(kills.of_workers, engine="ray"), 4, 30, "SIGKILL at a random step"
    ),
    "memory refused": Attack(
        memory.memory_refused, 6, 50, "no more addresses for a worker, from a random step on"
    ),
    "out-of-memory kills": Attack(
        memory.memory_kills, 6, 50, "by the kernel, at the limit of a cgroup"
    ),
    "tiny trials, local engine": Attack(
        partial(kills.many_trials, engine="local"), 100, 2000, "two steps each"
    ),
    "tiny trials, Ray": Attack(
        partial(kills.many_trials, engine="ray"), 50, 2000, "two steps each"
    ),
    "attach, train, detach": Attack(
        hardships.attach_and_detach, 30, 1800, "memory left behind, for so many seconds"
    ),
}


def run(full: bool, only: list[str], count: int | None, minutes: float | None, more: bool) -> None:
    """Attack after attack, each put into the record when it is done; the others stay there as they are. `more` goes on
    from what the record has counted, at other random points."""
    for name, attack in ATTACKS.items():
        if only and name not in only:
            continue
        times = count or (attack.full if full else attack.usual)
        before = _recorded().get(name, {}) if more else {}
        done = _done(before)
        if times <= done:
            continue
        patience.allow(minutes)
        began, processor = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                tally = attack.do(times - done, Path(folder), random.Random(done))
            except CannotAttack as error:
                print(f"{name}: left out, {error}", file=sys.stderr, flush=True)
                continue
        spent = {
            "seconds": round(time.monotonic() - began, 1),
            "processor": round(time.process_time() - processor, 1),
        }
        row = {
            "what": attack.what,
            "asked": times,
            "full": attack.full,
            **_sum(before, {**tally, **spent}),
        }
        print(name, row, file=sys.stderr, flush=True)
        rows = _recorded()
        rows[name] = row | {"environment": describe(1, "cpu")}
        write_json(RECORD, {"attacks": {n: rows[n] for n in ATTACKS if n in rows}})


def _recorded() -> dict[str, Any]:
    return dict(read_json(RECORD)["attacks"]) if RECORD.exists() else {}


def _done(row: dict[str, Any]) -> int:
    """How often an attack was repeated; where it feeds several readers, each of them."""
    return min(
        (n for what, n in row.items() if what.startswith("inputs to ")),
        default=row.get("repetitions", 0),
    )


def _sum(before: dict[str, Any], counted: dict[str, Any]) -> dict[str, Any]:
    """What was counted before and now, together."""
    were = {k: v for k, v in before.items() if k not in ("what", "asked", "full", "environment")}
    return {k: round(were.get(k, 0) + counted.get(k, 0), 1) for k in {**were, **counted}}


def main() -> int:
    told = {
        "description": reliability.__doc__,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", **told)
    parser.add_argument("--full", action="store_true", help="as often as the goal says: hours")
    parser.add_argument("--count", type=int, help="so often; with --only")
    parser.add_argument(
        "--minutes", type=float, help="no repetition of an attack begins later than that"
    )
    parser.add_argument(
        "--only", action="append", default=[], choices=list(ATTACKS), help="this attack; repeatable"
    )
    parser.add_argument(
        "--more",
        action="store_true",
        help="go on with attacks that were ended by time; with --only",
    )
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    options = parser.parse_args()
    if options.count is not None and (options.count < 1 or not options.only):
        parser.error(
            f"--count is 1 or more and goes with --only, got {options.count} for {len(options.only)} attacks"
        )
    if options.more and not options.only:
        parser.error("--more goes with --only: which attack is to go on?")
    if not options.page:
        run(options.full, options.only, options.count, options.minutes, options.more)
    text = page(read_json(RECORD), list(ATTACKS))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
