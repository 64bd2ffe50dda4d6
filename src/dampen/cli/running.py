"""What `run`, `compare` and `demo` share: run a plan with a live view, print its table, say how to go on."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from dampen.cli.common import print_json
from dampen.studies.config.plan import Comparison
from dampen.studies.config.trial import Run
from dampen.studies.records.record import RunStore

if TYPE_CHECKING:
    from dampen.studies.engines.runner import ComparisonResult


def execute(
    plan: Comparison,
    folder: Path,
    trials: list[Run],
    as_json: bool,
    execution: dict[str, Any],
    next_steps: list[str],
    page: Path | None = None,
    **options: Any,
) -> None:
    """Run the trials, show progress (on standard error with --json), print the table, exit with the run's code.

    Where a `page` is asked for, the report of the finished run is written there.
    """
    from dampen.studies.engines.runner import run_comparison
    from dampen.studies.records.table import comparison_table, read_runs
    from dampen.studies.report.terminal import LiveView, console_for, results_table
    from dampen.studies.trainer.state import Execution

    console = console_for(stderr=as_json)
    labels = plan.labels(trials)
    done = sum(RunStore(folder / t.id).done for t in trials)
    told = f"{plan.name}: {len(trials)} trials in {folder}" + (f", {done} already recorded" if done else "")
    console.print(told, soft_wrap=True)
    heed_signals()
    runs = read_runs(plan, folder)

    def table() -> Any:
        runs.update(read_runs(plan, folder, known=runs))
        return results_table(comparison_table(plan, runs), verdicts=False)

    with LiveView(console, labels, done, table) as view:
        run = run_comparison(plan, folder, trials, Execution(**execution), view, **options)
    conclude(console, run, as_json, next_steps, page)


def conclude(
    console: Console,
    run: ComparisonResult,
    as_json: bool,
    next_steps: list[str],
    page: Path | None = None,
    said: str = "",
) -> NoReturn:
    """The end of a run: the page, the table, what was learned in words, what to type next, the exit code."""
    from dampen.studies.report.advice import advise, in_words
    from dampen.studies.report.terminal import results_table

    if page is not None and run.exit_code == 0:
        from dampen.studies.report import write_report

        write_report([run.folder], page)
        next_steps = [f"open {page}", *next_steps]
    elif run.exit_code == 0:
        next_steps = [f"dampen report {run.folder} -o report.html", *next_steps]
    if as_json:
        print_json({**run.to_dict(), "page": str(page) if page is not None and page.exists() else None})
    else:
        console.print(results_table(run.table))
        for line in [*([said] if said else []), *in_words(advise(run.table))]:
            console.print(line, soft_wrap=True, markup=False)
        for line in what_went_wrong(run):
            console.print(f"dampen: {line}", style="red", soft_wrap=True, markup=False)
        if run.exit_code == 130:
            console.print(f"Interrupted. To resume: {resume_command()}", soft_wrap=True, markup=False)
        elif run.exit_code == 0 and next_steps:
            console.print("Next: " + "\n      ".join(next_steps), soft_wrap=True, markup=False)
    raise typer.Exit(run.exit_code)


def what_went_wrong(run: ComparisonResult) -> list[str]:
    """Each message once, with the trials that it is about."""
    from dampen.studies.report.names import listed

    labels, who = run.plan.labels(run.plan.trials.values()), dict[str, list[str]]()
    for message in run.messages():
        who[message] = [labels.get(i, i) for i, o in run.outcomes.items() if o.message == message]
    return [f"{listed(names)}: {message}" if names else message for message, names in who.items()]


def resume_command() -> str:
    """The command line that was typed: running it again resumes."""
    return shlex.join(["dampen", *sys.argv[1:]])


def heed_signals() -> None:
    """SIGTERM (a polite kill) and SIGHUP (the terminal is gone) are like Ctrl-C: checkpoint, then leave."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _as_interrupt)


def _as_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
