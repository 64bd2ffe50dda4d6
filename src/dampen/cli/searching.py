"""What `run` and `compare` share beyond the grid and beyond this machine: --search, --address."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dampen.studies.config.plan import Comparison
from dampen.studies.config.recipe import Recipe
from dampen.studies.errors import ConfigError

Address = Annotated[
    str | None, typer.Option(help="With --engine ray: the cluster's address; a local one is started when not said.")
]
SearchBy = Annotated[
    str | None, typer.Option("--search", metavar="optuna", help="Search each row's settings first, with equal effort.")
]
SearchTrials = Annotated[int, typer.Option("--search-trials", min=1, help="Trials of the search per row.")]
Storage = Annotated[
    str | None, typer.Option(help="Where the search is kept: an SQLAlchemy URL; default: SQLite in the run's folder.")
]


def engine_options(engine: str, workers: int | None, address: str | None) -> dict[str, Any]:
    """The options of `run_comparison` for an engine; one that nobody offers is refused before anything starts."""
    from dampen.studies.engines.engine import check_engine

    check_engine(engine)
    if address is not None and engine != "ray":
        raise ConfigError("--address", [f"only --engine ray has an address, the engine is {engine!r}"])
    return {"engine": engine, "workers": workers} | ({"address": address} if engine == "ray" else {})


def check_search(search: str | None) -> None:
    """Refuse what is not known."""
    if search not in (None, "optuna"):
        raise ConfigError("--search", [f"unknown search {search!r}; known: optuna"])


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
    """Where the recipe names tuning seeds: each row at the point validation prefers on them; else the plan itself."""
    from dampen.cli.racing import named
    from dampen.cli.running import resume_command
    from dampen.studies.engines.grid_tuning import STAGE, chosen_in_words, tune
    from dampen.studies.engines.runner import run_comparison
    from dampen.studies.records.record import RunStore
    from dampen.studies.report.terminal import LiveView, console_for
    from dampen.studies.trainer.state import Execution

    console = console_for(stderr=True)

    def run(tuning: Comparison, place: Path) -> int:
        trials = tuning.chosen()
        done = sum(RunStore(place / t.id).done for t in trials)
        recorded = f", {done} already recorded" if done else ""
        what = ", ".join(filter(None, ["tuning", tuning.header.get(STAGE)]))
        console.print(f"{what}: {len(trials)} trials in {place}{recorded}", soft_wrap=True)
        with LiveView(console, tuning.labels(trials), done) as view:
            made = run_comparison(tuning, place, trials, Execution(**named(execution, tuning)), view, **engine)
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


def searched(
    recipe: Recipe,
    folder: Path,
    execution: dict[str, Any],
    trials: int,
    storage: str | None,
    workers: int | None,
    scale: str | None = None,
    settings: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
) -> Comparison:
    """Search every row, with a line per trial on standard error, and return the plan of what was found best."""
    from dampen.studies.engines.search import search
    from dampen.studies.trainer.state import Execution

    def say(line: str) -> None:
        print(f"search: {line}", file=sys.stderr, flush=True)

    say(f"{trials} trials per row; Ctrl-C stops, the same command goes on")
    return search(recipe, folder, Execution(**execution), trials, storage, workers, scale, settings, seeds, say)
