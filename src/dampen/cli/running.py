"""What `run`, `compare` and `demo` share: run a plan with a live view,
tune, add seeds in rounds."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from dampen.cli.common import JUDGING, OUTPUT, RUNNING, TUNING, print_json
from dampen.names import printable
from dampen.studies.comparison import Comparison
from dampen.studies.errors import ConfigError, LabError, Terminated
from dampen.studies.recipe import Recipe
from dampen.studies.run import Run
from dampen.studies.store import RunStore

if TYPE_CHECKING:
    from dampen.studies.engines.runner import ComparisonResult
    from dampen.studies.report.summary import Advice


def execute(
    plan: Comparison,
    folder: Path,
    trials: list[Run],
    as_json: bool,
    execution: dict[str, Any],
    next_steps: list[str],
    report: bool = True,
    **options: Any,
) -> None:
    """Run the trials, show progress (on standard error with --json), print the table,
    exit with the run's code.

    Args:
        plan: the comparison.
        folder: of the study.
        trials: the runs to execute.
        as_json: print JSON for machines.
        execution: how runs are executed.
        next_steps: commands to suggest.
        report: write report.html in the folder, also when the run is interrupted.
    """
    from dampen.studies.engines.runner import run_comparison
    from dampen.studies.report.terminal import LiveView, console_for, results_table
    from dampen.studies.table import comparison_table, read_runs
    from dampen.studies.trainer.state import Execution

    console = console_for(stderr=as_json)
    labels = plan.labels(trials)
    done = sum(RunStore(folder / t.id).done for t in trials)
    logged = f", {done} already logged" if done else ""
    console.print(f"{plan.name}: {len(trials)} runs in {folder}{logged}", soft_wrap=True)
    heed_signals()
    runs = read_runs(plan, folder)

    def table() -> Any:
        runs.update(read_runs(plan, folder, known=runs))
        return results_table(comparison_table(plan, runs), verdicts=False)

    with LiveView(console, labels, done, table) as view:
        run = run_comparison(plan, folder, trials, Execution(**execution), view, **options)
    conclude(console, run, as_json, next_steps, report)


def conclude(
    console: Console,
    run: ComparisonResult,
    as_json: bool,
    next_steps: list[str],
    report: bool = True,
    said: str = "",
) -> NoReturn:
    """The end of a run: the table, an answer to each question, what failed, what to type next, the
    page, the exit code.

    Args:
        console: where to print.
        run: one run.
        as_json: print JSON for machines.
        next_steps: commands to suggest.
        report: write report.html in the folder of the study.
        said: a line above the advice.
    """
    from dampen.studies.report.summary import advise

    page = _write_page(console, run) if report else None
    if as_json:
        from dampen.studies.report.machine import document

        print_json(document(run, page))
        raise typer.Exit(run.exit_code)
    advice = advise(run.table)
    _print_answers(console, run, advice, said)
    for line in what_went_wrong(run):
        console.print(printable(f"dampen: {line}"), style="red", markup=False)
    steps = [*([advice.seeds] if advice.seeds else []), *next_steps]
    if run.exit_code == 130:
        console.print(f"Interrupted. To resume: {resume_command()}", soft_wrap=True, markup=False)
    elif run.exit_code in (0, 1) and steps:
        console.print("Next:", *(f"  {step}" for step in steps), sep="\n", **AS_TYPED)
    if page is not None:
        console.print(f"Report: {page}", **AS_TYPED)
    raise typer.Exit(run.exit_code)


AS_TYPED: dict[str, Any] = {"soft_wrap": True, "markup": False}
"""How a command or a path is printed: never broken, so that it can be copied."""


def _print_answers(console: Console, run: ComparisonResult, advice: Advice, said: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from dampen.studies.ensembles import ensembles_in_words
    from dampen.studies.report.settings import shorten
    from dampen.studies.report.summary import answered
    from dampen.studies.report.terminal import results_table

    table, shared = shorten(run.table)
    console.print(results_table(table, width=console.width))
    for line in filter(None, (shared, ensembles_in_words(table), said)):
        console.print(printable(line), markup=False)
    for question, answer in answered(advice):
        console.print(Text(question, style="bold"))
        console.print(Padding(Text(printable(answer)), (0, 0, 0, 2)))
        if advice.code and answer.startswith("Use "):
            console.print(f"  {printable(advice.code)}", **AS_TYPED)


def _write_page(console: Console, run: ComparisonResult) -> Path | None:
    """Write report.html in the folder of the study. A page that cannot be written is reported and
    costs no result."""
    from dampen.studies.report import write_report

    if not any(entry.summary.n for entry in run.table.entries):
        return None
    page = run.folder / "report.html"
    try:
        write_report([run.folder], page)
    except (LabError, OSError) as error:
        console.print(f"dampen: no report was written: {error}", style="red", **AS_TYPED)
        return None
    return page


def what_went_wrong(run: ComparisonResult) -> list[str]:
    """Each message once, with every failed run that it is about, by method. Messages that differ in
    their numbers are one message.

    Args:
        run: one run.
    """
    from dampen.studies.report.terminal import without_numbers

    messages = dict[str, str]()
    for message in run.messages():
        messages.setdefault(without_numbers(message), message)
    failed = {
        id: without_numbers(outcome.message)
        for id, outcome in run.outcomes.items()
        if outcome.status not in ("finished", "interrupted")
    }
    lines = []
    for key, message in messages.items():
        about = failed_seeds(run.plan, {id for id, said in failed.items() if said == key})
        lines.append(f"{about}: {message}" if about else message)
    return lines


def failed_seeds(plan: Comparison, failed: set[str]) -> str:
    """The failed runs in words: "X: 6 of 8 seeds failed (0, 1, 2, 3, 4, 5)".

    Args:
        plan: the comparison that they belong to.
        failed: the identities of the runs.

    Returns:
        Method after method, or an empty text if none is of this comparison.
    """
    runs = [
        (label.rpartition(" seed "), id) for id, label in plan.labels(plan.runs.values()).items()
    ]
    told = []
    for name in dict.fromkeys(name for (name, _, _), _ in runs):
        seeds = [(seed, id in failed) for (label, _, seed), id in runs if label == name]
        bad = [seed for seed, gone in seeds if gone]
        if bad:
            told.append(f"{name}: {len(bad)} of {len(seeds)} seeds failed ({', '.join(bad)})")
    return "; ".join(told)


def resume_command() -> str:
    """The command line that was typed: running it again resumes."""
    return shlex.join(["dampen", *sys.argv[1:]])


def heed_signals() -> None:
    """SIGTERM (a polite kill) and SIGHUP (the terminal is gone) are like
    Ctrl-C: checkpoint, then leave.

    A signal that is ignored since before the command started stays ignored (`nohup`, `&` in a
    script), but for Ctrl-C where there is a terminal to press it on.
    """
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
            signal.signal(getattr(signal, name), _as_interrupt)
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        and sys.stdin is not None
        and sys.stdin.isatty()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _as_interrupt(number: int, frame: Any) -> None:
    raise Terminated


UntilDecided = Annotated[
    bool,
    typer.Option(
        "--until-decided",
        help="Add seeds to inconclusive methods until every comparison is conclusive.",
        rich_help_panel=JUDGING,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="The same, for at most this long: 30m, 1h30m, 90s.",
        rich_help_panel=JUDGING,
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Equivalence margin (smallest effect of interest); default: the metric's.",
        rich_help_panel=JUDGING,
    ),
]
Tune = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Tune first: N settings per method and baseline, on 3 tuning seeds.",
        rich_help_panel=TUNING,
    ),
]
NoReport = Annotated[
    bool,
    typer.Option("--no-report", help="Do not write report.html.", rich_help_panel=OUTPUT),
]
Title = Annotated[
    str | None,
    typer.Option(help="The title of the table and of the page.", rich_help_panel=OUTPUT),
]
GOING = (0, 1, 4, 5)
"""Exit codes after which the other rows can run: all well, some trial failed,
was locked, diverged."""


def race_and_conclude(
    plan: Comparison,
    folder: Path,
    as_json: bool,
    execution: dict[str, Any],
    next_steps: list[str],
    *,
    margin: float | None,
    budget: str | None,
    first: int,
    report: bool = True,
    **options: Any,
) -> NoReturn:
    """Race the rows of a plan, print its table and how the race ended, exit with the run's code.

    Args:
        plan: the comparison.
        folder: the folder.
        as_json: print JSON for machines.
        execution: how runs are executed.
        next_steps: commands to suggest.
        margin: the equivalence margin; None: the metric's own.
        budget: how long at most, as in "30m".
        first: seeds of the first round.
        report: write report.html in the folder.
    """
    from dampen.studies.engines import Outcome
    from dampen.studies.engines.runner import ComparisonResult, run_comparison
    from dampen.studies.report.summary import listed
    from dampen.studies.report.terminal import LiveView, console_for, results_table
    from dampen.studies.sequential import race_plan, seconds
    from dampen.studies.table import comparison_table, read_runs
    from dampen.studies.trainer.state import Execution
    from dampen.studies.verdict import Verdict

    limit = seconds(budget) if budget is not None else None
    console = console_for(stderr=as_json)
    heed_signals()
    outcomes: dict[str, Outcome] = {}

    def run(trials: list[Run]) -> bool:
        done = sum(RunStore(folder / t.id).final() is not None for t in trials)
        where = named(execution, plan)
        with LiveView(console, plan.labels(trials), done, table) as view:
            result = run_comparison(plan, folder, trials, Execution(**where), view, **options)
        outcomes.update(result.outcomes)
        return result.exit_code in GOING

    def table() -> Any:
        return results_table(comparison_table(plan, read_runs(plan, folder)), verdicts=False)

    def look(round: int, open_: list[str], verdicts: Mapping[str, Verdict]) -> None:
        still = f"{len(open_)} of {len(verdicts)} methods inconclusive" + (
            f": {listed(open_)}" if open_ else ""
        )
        console.print(f"round {round}: {still}", soft_wrap=True, markup=False)

    told = f"{plan.name}: seeds until every comparison is conclusive" + (
        f", for {budget} at most" if budget else ""
    )
    console.print(f"{told}, in {folder}", soft_wrap=True, markup=False)
    found = race_plan(plan, folder, run, margin=margin, budget=limit, first=first, look=look)
    final = ComparisonResult(
        plan, folder, outcomes, comparison_table(plan, read_runs(plan, folder))
    )
    conclude(console, final, as_json, next_steps, report, said=found.told())


def named(execution: dict[str, Any], plan: Comparison) -> dict[str, Any]:
    """A training of the user's own knows its row by the trial's id, and every round has new trials.

    Args:
        execution: how runs are executed.
        plan: the comparison.
    """
    function = execution.get("function")
    if function is None:
        return execution
    names = plan.config_of_run()
    return {**execution, "function": replace(function, rows=names)}


Address = Annotated[
    str | None,
    typer.Option(
        help="With --engine ray: the cluster's address; starts a local cluster if omitted.",
        rich_help_panel=RUNNING,
    ),
]
SearchBy = Annotated[str | None, typer.Option("--search", hidden=True)]


def engine_options(
    engine: str, workers: int | None, address: str | None, per_gpu: int | None = None
) -> dict[str, Any]:
    """The options of `run_comparison` for an engine; one that nobody offers is refused before
    anything starts.

    Args:
        engine: local or ray.
        workers: processes at once.
        address: of a Ray cluster.
        per_gpu: processes that share a GPU, of the local engine.
    """
    from dampen.studies.engines import check_engine

    check_engine(engine)
    if address is not None and engine != "ray":
        raise ConfigError(
            "--address", [f"only --engine ray has an address, the engine is {engine!r}"]
        )
    if per_gpu is not None and engine != "local":
        raise ConfigError(
            "--per-gpu", [f"only --engine local shares GPUs this way, the engine is {engine!r}"]
        )
    shared = {} if per_gpu is None else {"per_gpu": per_gpu}
    return {"engine": engine, "workers": workers, **shared} | (
        {"address": address} if engine == "ray" else {}
    )


def refuse_search(search: str | None) -> None:
    """Say what replaced the search with Optuna.

    Args:
        search: what was given for `--search`; None: nothing.
    """
    if search is not None:
        remedy = "compare --tune N, or a [search] table in the recipe, tunes every method alike"
        raise ConfigError("--search", [f"the search with Optuna was removed: {remedy}"])


def tuned(
    recipe: Recipe,
    plan: Comparison,
    folder: Path,
    execution: dict[str, Any],
    scale: str | None,
    settings: Sequence[str],
    rows: Sequence[str],
    **engine: Any,
) -> Comparison:
    """Where the recipe names tuning seeds: each row at the point validation prefers on them; else
    the plan itself.

    Args:
        recipe: what to compare.
        plan: the comparison.
        folder: the folder.
        execution: how runs are executed.
        scale: one of the recipe's scales.
        settings: how much to measure.
        rows: only these configurations.
    """
    from dampen.cli.running import named, resume_command
    from dampen.studies.engines.runner import run_comparison
    from dampen.studies.report.terminal import LiveView, console_for
    from dampen.studies.store import RunStore
    from dampen.studies.trainer.state import Execution
    from dampen.studies.tuning import STAGE, chosen_in_words, tune

    console = console_for(stderr=True)

    def run(tuning: Comparison, place: Path) -> int:
        trials, own = tuning.chosen(), named(execution, tuning)
        if own.get("function") is not None:
            own["function"] = replace(own["function"], must_validate=True)
        done = sum(RunStore(place / t.id).done for t in trials)
        recorded = f", {done} already logged" if done else ""
        what = ", ".join(filter(None, ["tuning", tuning.header.get(STAGE)]))
        console.print(f"{what}: {len(trials)} trials in {place}{recorded}", soft_wrap=True)
        with LiveView(console, tuning.labels(trials), done) as view:
            made = run_comparison(tuning, place, trials, Execution(**own), view, **engine)
        for message in made.messages():
            console.print(f"dampen: {message}", style="red", soft_wrap=True, markup=False)
        return made.exit_code

    plan, code = tune(recipe, plan, folder, scale, settings, rows, run)
    if code == 130:
        console.print(f"Interrupted. To resume: {resume_command()}", soft_wrap=True, markup=False)
    if code:
        raise typer.Exit(code)
    for line in chosen_in_words(folder):
        console.print(line, soft_wrap=True, markup=False)
    return plan
