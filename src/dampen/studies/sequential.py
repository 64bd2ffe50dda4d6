"""As many seeds as it takes, and no more: rounds of seeds for the rows that are still
open, judged at every look.

`race` knows nothing of runs: it requests pairs of a configuration and a seed, and reads values.
`race_plan` lets it run a comparison, by the built-in trainer or by a user's function alike.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.comparison import Comparison
from dampen.studies.errors import ConfigError
from dampen.studies.run import Run
from dampen.studies.stats import LEVEL, first_round, has_spread, paired_differences, seeds_needed
from dampen.studies.table import comparison_table, read_runs
from dampen.studies.verdict import NO_VARIATION, Verdict, judge

MOST_SEEDS = 64
"""A row that is open after so many seeds stays so."""

Pair = tuple[str, int]
"""A row and a seed."""


@dataclass
class Race:
    """What became of a race."""

    verdicts: dict[str, Verdict]
    runs: int
    rounds: int
    why: (
        str  # 'all decided', 'time used', 'most seeds', 'stopped', 'no reference' or 'no variation'
    )
    seeds: dict[str, int] = field(default_factory=dict)  # of each row
    failed: list[str] = field(default_factory=list)
    fixed: int | None = None  # runs of a fixed plan that decides the same rows with power 0.8

    def told(self) -> str:
        """What happened, in a sentence or two."""
        if not self.seeds:
            return "Stopped before the first run was finished; the same command resumes."
        fewest, most = min(self.seeds.values()), max(self.seeds.values())
        seeds = f"{fewest} to {most} seeds" if fewest < most else f"{most} seeds each"
        spent = f"{self.runs} runs in {self.rounds} round{'s' * (self.rounds != 1)}, {seeds}"
        ends = {
            "all decided": "every comparison is conclusive",
            "time used": "the time is used; rerun the same command to resume",
            "most seeds": f"no method gets more than {MOST_SEEDS} seeds",
            "stopped": "stopped; rerun the same command to resume",
            "no reference": "the baseline failed",
            "no variation": f"{NO_VARIATION}, so more seeds change nothing",
        }
        text = f"{spent}: {ends[self.why]}."
        if self.fixed and self.why == "all decided":
            text += f" A plan fixed before, with power 0.8 for the same differences, would have taken {self.fixed} runs."
        return text


def race(
    rows: Sequence[str],
    reference: str,
    run: Callable[[list[Pair]], bool],
    values: Callable[[], Mapping[str, Mapping[str, float]]],
    metric: str | Callable[[], str],
    *,
    better: Callable[[], str | None] = lambda: None,
    margin: float | None = None,
    budget: float | None = None,
    first: int | None = None,
    most: int = MOST_SEEDS,
    clock: Callable[[], float] = time.monotonic,
    added: Mapping[str, int] | None = None,
    look: Callable[[int, list[str], Mapping[str, Verdict]], None] = lambda round, open_, verdicts: (
        None
    ),
) -> Race:
    """Run seeds round by round until every row is decided, the time (seconds) is
    used, or `most` seeds are.

    Args:
        rows: all rows but the reference. Those that drop out stay in the number of tests.
        run: trains these pairs of row and seed (what is recorded already costs nothing); False
            stops the race.
        values: what is recorded, by row and seed, in the unit of tables.
        metric: the metric that judges, or a function where the first results say which it is.
        first: seeds of the first round; never fewer than can decide anything.
        added: rows that were added after a look, as for `verdict.judge_pairs`.
        look: called after every round with its number, the rows still open and the verdicts so far.
    """
    began = clock()
    start = max(first_round(len(rows)), first or 0)
    out = Race({}, 0, 0, "stopped")
    open_, seed, last = list(rows), 0, 0.0
    while True:
        if budget is not None and seed and clock() - began + last > budget:
            out.why = "time used"
            break
        if seed >= most:
            out.why = "most seeds"
            break
        # One seed at a time while there is a clock to watch, so that even the
        # first round can end in time.
        until = seed + 1 if budget is not None or seed else start
        pairs = [(row, s) for s in range(seed, until) for row in (reference, *open_)]
        at = clock()
        going = run(pairs)
        last, seed, out.runs = clock() - at, until, out.runs + len(pairs)
        found = values()
        failed = [row for row in open_ if str(seed - 1) not in found.get(row, {})] if going else []
        out.failed += failed
        open_ = [row for row in open_ if row not in failed]
        known = {
            row: found.get(row, {})
            for row in (reference, *(r for r in rows if r not in out.failed))
        }
        name = metric() if callable(metric) else metric
        out.verdicts = judge(
            known,
            reference,
            name,
            better=better(),
            margin=margin,
            test="sequential",
            added=added,
        )
        out.seeds = {row: len(mine) for row, mine in known.items() if mine}
        if seed >= start or not going:
            out.rounds += 1
            same = [row for row in open_ if _same(found[row], found[reference])]
            open_ = [
                row
                for row in open_
                if row not in same and out.verdicts[row].verdict == "inconclusive"
            ]
            constant = [row for row in open_ if out.verdicts[row].because == NO_VARIATION]
            if constant and constant == open_:
                out.why = "no variation"
                look(out.rounds, open_, out.verdicts)
                break
            look(out.rounds, open_, out.verdicts)
        if not going:
            break
        if str(seed - 1) not in known[reference]:
            out.why = "no reference"
            break
        if not open_:
            out.why = "all decided"
            break
    # A resumed race reads at its first look what an earlier one recorded, and so
    # requests less than there is.
    out.runs = max(out.runs, sum(out.seeds.values()))
    out.fixed = _fixed_plan(values(), reference, out.verdicts)
    return out


def _same(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    """Whether every seed came out exactly as the reference's: a method that did nothing here has
    nothing to decide."""
    return not any(paired_differences(ours, theirs))


def _fixed_plan(
    found: Mapping[str, Mapping[str, float]], reference: str, verdicts: Mapping[str, Verdict]
) -> int | None:
    """Runs of a plan fixed before that decides, with power 0.8, what the race decided: every row
    gets as many seeds as the row that needs the most."""
    needed = []
    for row, c in verdicts.items():
        d = paired_differences(found.get(row, {}), found.get(reference, {}))
        if c.verdict == "inconclusive" or not has_spread(d):
            continue
        margin = c.margin or 0.0
        gap = {"equal": margin - abs(c.difference), "no gain": margin + abs(c.difference)}.get(
            c.verdict, c.difference
        )
        needed.append(seeds_needed(gap, c.sd, LEVEL / len(verdicts)))
    if not needed or any(n is None for n in needed):
        return None
    return (len(verdicts) + 1) * max(n for n in needed if n is not None)


def race_plan(
    plan: Comparison,
    folder: Path,
    run: Callable[[list[Run]], bool],
    *,
    margin: float | None = None,
    budget: float | None = None,
    first: int | None = None,
    most: int = MOST_SEEDS,
    look: Callable[[int, list[str], Mapping[str, Verdict]], None] = lambda round, open_, verdicts: (
        None
    ),
) -> Race:
    """Race the rows of a plan; `run` trains trials of it, which are then logged in `folder`, and
    returns whether to continue. The plan grows by the requested seeds, and says that its test is the
    sequential one.

    Args:
        plan: the comparison.
        folder: of its runs.
        run: trains runs, which are then recorded; False stops.
        margin: the smallest difference of interest; default: the metric's.
        budget: seconds.
        first: seeds of the first round; never fewer than can decide anything.
        most: seeds after which an inconclusive configuration stays so.
        look: called after every round.
    """
    several = [row.name for row in plan.configs if len(row.settings) != 1]
    reference = next((row.name for row in plan.configs if row.baseline), None)
    problems = [
        f"{name} has several settings; choose one, or tune them first (--tune 10)"
        for name in several
    ]
    problems += ["there is no row to compare with"] if reference is None else []
    if problems or reference is None:
        raise ConfigError("--until-decided", problems)
    folds = plan.header.get("folds") or 1  # a seed of the race is then a round of them, averaged
    plan.header |= {"test": "sequential"} | ({} if margin is None else {"margin": margin})

    settings = {config.name: config.settings[0] for config in plan.configs}

    def table() -> Any:
        return comparison_table(plan, read_runs(plan, folder))

    def train(pairs: list[Pair]) -> bool:
        wanted = [
            (settings[name], folds * seed + fold) for name, seed in pairs for fold in range(folds)
        ]
        return run([plan.run_of(setting, seed) for setting, seed in wanted])

    def values() -> dict[str, dict[str, float]]:
        return {entry.name: entry.paired(entry.values) for entry in table().entries}

    rows = [row.name for row in plan.configs if row.name != reference]
    found = race(
        rows,
        reference,
        train,
        values,
        lambda: table().study.metric,
        better=lambda: table().study.mode,
        margin=margin,
        budget=budget,
        first=first,
        most=most,
        added=plan.header.get("added"),
        look=look,
    )
    plan.header["race"] = {
        "runs": found.runs,
        "rounds": found.rounds,
        "why": found.why,
        "fixed": found.fixed,
    }
    plan.save(folder)
    return found


def seconds(text: str | float) -> float:
    """A time in seconds.

    Args:
        text: such as 30m, 1h30m or 90s, or a number of seconds.

    >>> seconds("30m"), seconds("1h30m"), seconds("90s"), seconds(2.5)
    (1800.0, 5400.0, 90.0, 2.5)
    """
    if isinstance(text, int | float):
        found = float(text)
    else:
        parts = re.fullmatch(
            r"\s*(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)\s*s)?\s*",
            text,
        )
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
            number = text.strip()
            raise ConfigError(
                "--budget",
                [f"{number} has no unit. Write {number}s, {number}m or {number}h."],
            )
        if parts is None or not any(parts.groups()):
            raise ConfigError(
                "--budget", [f"expected a time such as 30m, 1h30m or 90s, got {text!r}"]
            )
        found = sum(
            float(value or 0) * unit
            for value, unit in zip(parts.groups(), (3600, 60, 1), strict=True)
        )
    if not found > 0 or math.isinf(found):
        raise ConfigError("--budget", [f"must be a positive time, got {text!r}"])
    return found
