"""What `run`, `compare` and `demo` share: run a plan with a live view, print its table, say how to go on."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dampen.cli.common import print_json
from dampen.lab.plan import Plan
from dampen.lab.record import Record
from dampen.lab.trial import Trial


def execute(
    plan: Plan,
    folder: Path,
    trials: list[Trial],
    as_json: bool,
    execution: dict[str, Any],
    next_steps: list[str],
    page: Path | None = None,
    **options: Any,
) -> None:
    """Run the trials, show progress (on standard error with --json), print the table, exit with the run's code.

    Where a `page` is asked for, the report of the finished run is written there.
    """
    from dampen.lab.runner import run_plan
    from dampen.lab.session import Execution
    from dampen.lab.summary import read_results, summarize_plan
    from dampen.lab.table import LiveView, results_table

    console = Console(stderr=as_json, highlight=False)
    labels = trial_labels(plan, trials)
    done = sum(Record(folder / t.id).final() is not None for t in trials)
    told = f"{plan.name}: {len(trials)} trials in {folder}" + (f", {done} already recorded" if done else "")
    console.print(told, soft_wrap=True)
    signal.signal(signal.SIGTERM, _as_interrupt)
    results = read_results(plan, folder)

    def table() -> Any:
        results.update(read_results(plan, folder, known=results))
        return results_table(plan, summarize_plan(plan, results), verdicts=False)

    with LiveView(console, labels, done, table) as view:
        run = run_plan(plan, folder, trials, Execution(**execution), view, **options)
    if page is not None and run.exit_code == 0:
        from dampen.lab.report import write_report

        write_report([folder], page)
        next_steps = [f"open {page}", *next_steps]
    elif run.exit_code == 0:
        next_steps = [f"dampen report {folder} -o report.html", *next_steps]
    if as_json:
        print_json({**run.to_dict(), "page": str(page) if page is not None and page.exists() else None})
    else:
        console.print(results_table(plan, run.rows))
        for message in run.messages():
            console.print(f"dampen: {message}", style="red", soft_wrap=True, markup=False)
        if run.exit_code == 130:
            console.print(f"Interrupted. To resume: {resume_command()}", soft_wrap=True, markup=False)
        elif run.exit_code == 0 and next_steps:
            console.print("Next: " + "\n      ".join(next_steps), soft_wrap=True, markup=False)
    raise typer.Exit(run.exit_code)


def trial_labels(plan: Plan, trials: list[Trial]) -> dict[str, str]:
    """Row, grid point and seed of each trial, for people."""
    wanted = {t.id for t in trials}
    labels: dict[str, str] = {}
    for row in plan.rows:
        for point in row.points:
            grid = "".join(f" {k.split('.')[-1]}={v}" for k, v in point.grid.items())
            for seed, trial in point.trials.items():
                if trial in wanted:
                    labels.setdefault(trial, f"{row.name}{grid} seed {seed}")
    return labels


def resume_command() -> str:
    """The command line that was typed: running it again resumes."""
    return shlex.join(["dampen", *sys.argv[1:]])


def _as_interrupt(number: int, frame: Any) -> None:
    """A polite kill is like Ctrl-C: checkpoint, then leave."""
    raise KeyboardInterrupt
