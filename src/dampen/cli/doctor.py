"""`dampen doctor`: what is installed, found and missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dampen.cli.common import DataDir, Json, Out, command, print_json


@command("dampen doctor\ndampen doctor --data-dir data --json\ndampen doctor --build")
def doctor(
    data_dir: DataDir = None,
    out: Out = Path("runs"),
    tune: Annotated[bool, typer.Option("--tune", hidden=True)] = False,
    build: Annotated[
        bool, typer.Option("--build", help="First build the native kernels for this processor, unless they are there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what is installed, which devices, kernels and data sets there are; exit code 1 if something is wrong."""
    from dampen.studies.doctor import examine, to_json

    if build:
        _build()
    if tune:
        typer.echo("--tune was removed: a table measured here gained less than 5 % of a step. Leave it out.", err=True)
    findings = examine(data_dir, out)
    if as_json:
        print_json(to_json(findings))
    else:
        table = Table(show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for f in findings:
            remedy = f" -> {f.remedy}" if f.remedy else ""
            table.add_row("[green]ok" if f.ok else "[red]wrong", escape(f.what), escape(f.found + remedy))
        Console(highlight=False).print(table)
    if not all(f.ok for f in findings):
        raise typer.Exit(1)


def _build() -> None:
    from dampen.native.library import BuildError, build

    try:
        build()
    except BuildError as error:  # nobody needs them: everything runs on torch alone
        Console(stderr=True, highlight=False).print(f"native kernels were not built: {escape(str(error))}")
