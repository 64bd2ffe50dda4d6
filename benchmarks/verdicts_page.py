"""docs/verdicts.md: what the verdicts are worth, from the committed simulations and races.

    python -m benchmarks.verdicts_page [--check]
    python -m benchmarks.verdicts_page --collect NAME FOLDER    # a finished `dampen compare --until-decided`

`--collect` reads the folder of a race and keeps its rows, verdicts and numbers of runs in benchmarks/records/races.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import publish
from dampen.lab.config.plan import Plan
from dampen.lab.files import write_json
from dampen.lab.records.plain import finite
from dampen.lab.records.stats import LEVEL, seeds_needed
from dampen.lab.records.table import plan_table, read_runs

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "verdicts.md"
POWER, RACES = HERE / "records" / "verdict_power.json", HERE / "records" / "races.json"


def collected(folder: Path) -> dict[str, Any]:
    """What a race decided, and what plans fixed before would have taken."""
    plan = Plan.load(folder)
    table = plan_table(plan, read_runs(plan, folder))
    compared = {e.name: e.comparison for e in table.compared() if e.comparison}
    reference = table.main_reference
    rows = {
        name: {
            "verdict": c.verdict, "told": table.entry(name).told(table.metric), "seeds": table.entry(name).summary.n,
            "difference": round(c.difference, 3), "low": round(c.low, 3), "high": round(c.high, 3), "sd": round(c.sd, 3),
        }
        for name, c in compared.items()
    }  # fmt: skip
    margin = table.margin or 0.0
    blind = [seeds_needed(margin, c.sd, LEVEL / len(compared)) for c in compared.values()]
    runs = sum(e.summary.n for e in table.entries)
    return finite({
        "command": plan.header["command"], "metric": table.study.metric, "margin": margin, **plan.header["race"],
        "runs": runs, "reference": {"name": reference.name, "seeds": reference.summary.n} if reference else None,
        "rows": rows,
        "fixed_for_margin": None if None in blind else (len(compared) + 1) * max(n for n in blind if n is not None),
    })  # fmt: skip


def simulation_part(power: dict[str, Any]) -> list[str]:
    """Level and power as tables."""
    fixed = power["false claims, fixed plan"]
    looked = power["false claims, t-tests looked at after each of 100 seeds"]
    sequential = power["false claims, sequential, 100 looks"]
    lines = [
        "## How often a verdict is wrong", "",
        f"Simulated tables without any difference ({power['tables']['level']:,} each; differences {power['differences']}). "
        "A false claim is a table in which any row is called better or worse; the promise is at most 5 %.", "",
        "| kind of test | rows | seeds | false claims |", "|---|---|---|---|",
    ]  # fmt: skip
    for key, value in fixed.items():
        rows, seeds = (part.split()[0] for part in key.split(", "))
        lines.append(f"| fixed plan (paired t, Holm) | {rows} | {seeds} | {value:.1%} |")
    for key, value in looked.items():
        lines.append(f"| t-tests looked at after every seed (what not to do) | {key.split()[0]} | 100 | {value:.1%} |")
    for key, value in sequential.items():
        lines.append(f"| sequential (e-process, Holm at every look) | {key.split()[0]} | 100 | {value:.1%} |")
    covered = power["coverage, sequential interval after 100 looks"]
    lines += ["", f"The sequential interval contains the truth at all of 100 looks in {covered:.1%} of the tables.", ""]
    lines += ["## What a table can show", ""]
    lines += ["Share of true differences that a fixed plan shows, by size in standard deviations of the difference:", ""]
    counts = list(next(iter(power["power, fixed plan"].values())))
    lines += [f"| difference, rows | {' | '.join(counts)} |", "|---|" + "---|" * len(counts)]
    for key, found in power["power, fixed plan"].items():
        lines.append(f"| {key} | " + " | ".join(f"{found[n]:.0%}" for n in counts) + " |")
    lines += ["", "Seeds that the sequential test takes, looking after every one:", ""]
    lines += ["| difference, rows | half of the tables | 80 % of the tables |", "|---|---|---|"]
    for key, found in power["seeds to decide, sequential"].items():
        lines.append(f"| {key} | {found['median']:.0f} | {found['80 %']:.0f} |")
    return [*lines, "", f"Made by `{power['command']}`.", ""]


def race_part(races: dict[str, Any]) -> list[str]:
    """Real comparisons with --until-decided, each with what it saved."""
    lines = ["## As many seeds as it takes", ""]
    for name, race in races.items():
        lines += [f"### {name}", "", "```", race["command"], "```", ""]
        lines += ["| row | seeds | difference | interval | verdict |", "|---|---|---|---|---|"]
        for row, c in race["rows"].items():
            interval = f"{c['low']:+.2f} to {c['high']:+.2f}" if c["low"] is not None else ""
            lines.append(f"| {row} | {c['seeds']} | {c['difference']:+.2f} | {interval} | {c['told']} |")
        lines += ["", race_sentence(race), ""]
    return lines


def race_sentence(race: dict[str, Any]) -> str:
    """Runs of the race against runs of plans fixed before."""
    ended = {"all decided": "every row decided", "time used": "the time was used first"}.get(race["why"], race["why"])
    told = f"{race['runs']} runs in {race['rounds']} looks, {ended}."
    if race["fixed"]:
        saved = race["fixed"] - race["runs"]
        told += f" A plan fixed before with power 0.8 for just these differences (which nobody knows before) takes {race['fixed']} runs: "
        told += f"{saved} saved ({saved / race['fixed']:.0%})." if saved >= 0 else f"{-saved} fewer than the race."
    margin = f"{race['margin']:g}"
    if race["fixed_for_margin"]:
        saved = race["fixed_for_margin"] - race["runs"]
        told += f" A plan with power 0.8 for the margin of {margin}, which is what can be planned for, takes {race['fixed_for_margin']:,}: "
        told += f"{saved:,} saved ({saved / race['fixed_for_margin']:.0%})."
    return told


def page() -> str:
    """The page as text."""
    power, races = (json.loads(path.read_text()) for path in (POWER, RACES))
    head = [
        "# What the verdicts are worth", "",
        "Generated by `python -m benchmarks.verdicts_page` from `benchmarks/records/verdict_power.json` and "
        "`benchmarks/records/races.json`.", "",
        "A row is **better**, **worse**, **equal** within the margin, or **not decided** (then the table says about how many "
        "seeds would decide it). The interval beside a verdict is made at the level at which the row was judged, so the "
        "two never contradict each other. A plan whose number of seeds was fixed before is judged by paired t-tests; one "
        "that was looked at while it grew (`--until-decided`, `--budget`, `study.add`) by an e-process that is valid at "
        "every look. Both are corrected over the rows by Holm's method.", "",
    ]  # fmt: skip
    return "\n".join([*head, *simulation_part(power), *race_part(races)]).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is out of date")
    parser.add_argument("--collect", nargs=2, metavar=("NAME", "FOLDER"), help="keep what a race decided")
    options = parser.parse_args(arguments)
    if options.collect:
        name, folder = options.collect
        known = json.loads(RACES.read_text()) if RACES.exists() else {}
        write_json(RACES, known | {name: collected(Path(folder))})
    return publish({PAGE: page()}, options.check)


if __name__ == "__main__":
    raise SystemExit(main())
