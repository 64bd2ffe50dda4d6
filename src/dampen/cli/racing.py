"""`--until-decided` and `--budget`: seeds in rounds until every row is decided, with a live view of each round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dampen.cli.running import conclude, heed_signals
from dampen.studies.config.plan import Comparison
from dampen.studies.config.trial import Run
from dampen.studies.records.record import RunStore

UntilDecided = Annotated[
    bool,
    typer.Option("--until-decided", help="Add seeds to the rows that are still open until every row is decided."),
]
Budget = Annotated[str | None, typer.Option(metavar="TIME", help="The same, for at most this long: 30m, 1h30m, 90s.")]
Margin = Annotated[
    float | None,
    typer.Option(min=0, help="The smallest difference that matters, as tables show it; default: the metric's own."),
]
Tune = Annotated[
    int | None,
    typer.Option(min=2, metavar="N", help="Tune first: N settings of every row, the baseline too, on 3 tuning seeds."),
]
GOING = (0, 1, 4, 5)
"""Exit codes after which the other rows can go on: all well, some trial failed, was locked, diverged."""


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
    **options: Any,
) -> NoReturn:
    """Race the rows of a plan, print its table and how the race ended, exit with the run's code."""
    from dampen.studies.engines.engine import Outcome
    from dampen.studies.engines.racing import race_plan, seconds
    from dampen.studies.engines.runner import ComparisonResult, run_comparison
    from dampen.studies.records.table import comparison_table, read_runs
    from dampen.studies.records.verdict import Verdict
    from dampen.studies.report.names import listed
    from dampen.studies.report.terminal import LiveView, console_for, results_table
    from dampen.studies.trainer.state import Execution

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
        still = f"{len(open_)} of {len(verdicts)} rows open" + (f": {listed(open_)}" if open_ else "")
        console.print(f"round {round}: {still}", soft_wrap=True, markup=False)

    told = f"{plan.name}: seeds until every row is decided" + (f", for {budget} at most" if budget else "")
    console.print(f"{told}, in {folder}", soft_wrap=True, markup=False)
    found = race_plan(plan, folder, run, margin=margin, budget=limit, first=first, look=look)
    final = ComparisonResult(plan, folder, outcomes, comparison_table(plan, read_runs(plan, folder)))
    conclude(console, final, as_json, next_steps, said=found.told())


def named(execution: dict[str, Any], plan: Comparison) -> dict[str, Any]:
    """A training of the user's own knows its row by the trial's id, and every round has new trials."""
    function = execution.get("function")
    if function is None:
        return execution
    names = {i: row.name for row in plan.rows for point in row.points for i in point.trials.values()}
    return {**execution, "function": replace(function, rows=names)}
