"""What `run` and `compare` share beyond the grid and beyond this machine: --search, --address."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dampen.lab.errors import ConfigError
from dampen.lab.plan import Plan
from dampen.lab.recipe import Recipe

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
    """The options of `run_plan` for an engine."""
    if address is not None and engine != "ray":
        raise ConfigError("--address", [f"only --engine ray has an address, the engine is {engine!r}"])
    return {"engine": engine, "workers": workers} | ({"address": address} if engine == "ray" else {})


def check_search(search: str | None) -> None:
    """Refuse what is not known."""
    if search not in (None, "optuna"):
        raise ConfigError("--search", [f"unknown search {search!r}; known: optuna"])


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
) -> Plan:
    """Search every row, with a line per trial on standard error, and return the plan of what was found best."""
    from dampen.lab.search import search
    from dampen.lab.session import Execution

    def say(line: str) -> None:
        print(f"search: {line}", file=sys.stderr, flush=True)

    say(f"{trials} trials per row; Ctrl-C stops, the same command goes on")
    return search(recipe, folder, Execution(**execution), trials, storage, workers, scale, settings, seeds, say)
