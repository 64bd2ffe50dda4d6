"""`dampen noise`: how much the baseline varies between seeds, and so which differences a
comparison can detect."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dampen.cli.common import (
    DATA,
    JUDGING,
    DataDir,
    Json,
    Out,
    Settings,
    Workers,
    command,
    print_json,
)

COUNTS = (4, 8, 16, 32)
"""Numbers of seeds for which the detectable difference is given."""


@command(
    """dampen noise train.py:train --seeds 8
dampen noise train.py:train --seeds 8 --metric f1 --json
dampen noise --data digits --seeds 12"""
)
def noise(
    train: Annotated[
        str | None,
        typer.Argument(
            help="Training function as FILE.py:FUNCTION (default: the built-in trainer)."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="How many seeds.", rich_help_panel=JUDGING)] = 8,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The test metric, as in f1 or rmse:min; default: the first returned.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A data set, for the built-in trainer.", rich_help_panel=DATA),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model, for the built-in trainer.", rich_help_panel=DATA)
    ] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Train only the baseline, with several seeds. A later `dampen compare` of the same
    code counts these runs."""
    from dampen.cli.compare import refuse_options_of_the_trainer, request_of_function
    from dampen.cli.running import heed_signals, what_went_wrong
    from dampen.studies.engines.runner import run_comparison
    from dampen.studies.processes import warm_up
    from dampen.studies.report.terminal import LiveView, console_for
    from dampen.studies.request import request_parts
    from dampen.studies.store import RunStore
    from dampen.studies.trainer.state import Execution

    heed_signals()
    warm_up()
    if train is not None:
        refuse_options_of_the_trainer({"--data": data, "--model": model, "--data-dir": data_dir})
        asked = request_of_function(train, None, seeds, metric, settings or [], False, out, False)
    else:
        asked = request_parts(
            model,
            data or "digits",
            None,
            seeds,
            metric=metric,
            settings=settings or [],
            data_dir=data_dir,
            out=out,
        )
    console = console_for(stderr=as_json)
    done = sum(RunStore(asked.folder / t.id).done for t in asked.wanted)
    logged = f", {done} already logged" if done else ""
    console.print(f"baseline: {len(asked.wanted)} runs in {asked.folder}{logged}", soft_wrap=True)
    execution = Execution(data_dir=data_dir, function=asked.function, parts=asked.parts)
    with LiveView(console, asked.plan.labels(asked.wanted), done) as view:
        run = run_comparison(
            asked.plan, asked.folder, asked.wanted, execution, view, workers=workers
        )
    found = measured(run.table, shlex.join(["dampen", "compare", *([train] if train else [])]))
    if as_json:
        print_json({**found, "folder": str(asked.folder), "exit_code": run.exit_code})
        raise typer.Exit(run.exit_code)
    for line in what_went_wrong(run):
        console.print(f"dampen: {line}", style="red", markup=False)
    _print(console, found)
    raise typer.Exit(run.exit_code)


def measured(table: Any, compare: str) -> dict[str, Any]:
    """Mean, standard deviation and interval of the baseline, and the difference that each number of
    seeds can detect.

    Seeds are shared, so the differences of a comparison vary by at most sqrt(2) times as much as
    the baseline, and by less where a seed moves both alike. The figures take the upper end.

    Args:
        table: the table of a comparison.
        compare: the command that compares methods.
    """
    from dampen.studies.report.machine import VERSION
    from dampen.studies.stats import LEVEL, POWER, detectable, t_interval

    baseline = next(entry for entry in table.entries if entry.config.baseline)
    values = list(baseline.values.values())
    sd = statistics.stdev(values) if len(values) > 1 else None
    low, high = t_interval(values) if len(values) > 1 else (None, None)
    differing = 2**0.5 * sd if sd is not None else float("nan")
    known = sd is not None
    return {
        "schema": VERSION,
        "metric": table.study.metric,
        "unit": table.metric.points.strip(),
        "values": baseline.values,
        "n": len(values),
        "mean": statistics.fmean(values) if values else None,
        "sd": sd,
        "low": low,
        "high": high,
        "varies": bool(sd),
        "power": POWER,
        "detectable": {str(n): detectable(differing, n, LEVEL) for n in COUNTS} if known else {},
        "failures": baseline.problems,
        "next": f'{compare} --methods "drop_key, params(weight_decay=0.1)"',
    }


def _print(console: Any, found: dict[str, Any]) -> None:
    """The figures as two lines and a table."""
    if found["sd"] is None:
        console.print("Too few runs finished to measure how much the baseline varies.")
        return
    unit = f" {found['unit']}" if found["unit"] else ""
    console.print(
        f"The baseline's test {found['metric']} is {found['mean']:.4g}, with "
        f"a standard deviation of {found['sd']:.3g}"
        f"{unit} over {found['n']} seeds (95 % interval of the mean: "
        f"{found['low']:.4g} to {found['high']:.4g})."
    )
    if not found["varies"]:
        console.print(
            "It does not vary with the seed. Make sure that the function uses trial.seed."
        )
        return
    console.print(
        f"A comparison of one method has {100 * found['power']:.0f} % "
        "power to detect a true difference of at most:"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("seeds", "difference"):
        table.add_column(heading, justify="right")
    for seeds, difference in found["detectable"].items():
        table.add_row(seeds, f"{difference:.3g}{unit}")
    console.print(table)
    console.print(f"Next: {found['next']}", soft_wrap=True, markup=False)
