"""`dampen run`: a recipe. `dampen demo`: the main job on embedded data."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dampen.cli.common import (
    AllowIncomplete,
    DataDir,
    Json,
    Loggers,
    Out,
    PerGpu,
    Settings,
    Tensorboard,
    Weights,
    Workers,
    command,
    print_json,
)
from dampen.cli.running import (
    Address,
    SearchBy,
    engine_options,
    refuse_search,
    tuned,
)
from dampen.studies.comparison import Comparison, make_comparison
from dampen.studies.recipe import Recipe, load_recipe


@command(
    """dampen run my_recipe.toml --dry-run
dampen run my_recipe.toml --workers 4
dampen run my_recipe.toml --row DropKey --seed 0 --set train.epochs=5
dampen run reproductions/dropkey/schedules_cifar10.toml --scale laptop --data-dir data --allow-incomplete"""
)
def run(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or a name from dampen list recipes.")],
    scale: Annotated[
        str | None, typer.Option(help="One of the recipe's scales; the recipe names its default.")
    ] = None,
    row: Annotated[
        list[str] | None, typer.Option(help="Run only this configuration. Repeatable.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Run only this seed. Repeatable.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    allow_incomplete: AllowIncomplete = False,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices per run.")] = None,
    strategy: Annotated[str | None, typer.Option(help="ddp or fsdp, with several devices.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    engine: Annotated[str, typer.Option(help="Where runs execute: local or ray.")] = "local",
    address: Address = None,
    workers: Workers = None,
    per_gpu: PerGpu = None,
    search: SearchBy = None,
    tensorboard: Tensorboard = False,
    logger: Loggers = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Repeat runs whose loss became NaN.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run.")] = False,
    weights: Weights = True,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Run a recipe: rows x grid x seeds. Finished runs are skipped, interrupted ones resume
    bit-exactly."""
    from dampen.cli.running import execute, heed_signals
    from dampen.studies.processes import warm_up

    refuse_search(search)
    chosen = engine_options(engine, workers, address, per_gpu)
    changes = list(settings or [])
    options = {"train.devices": devices, "train.strategy": strategy, "train.precision": precision}
    changes += [f"{k}={v!r}" for k, v in options.items() if v is not None]
    changes += ["data.partial=true"] if allow_incomplete else []
    changes += ["train.compile=true"] if compile_ else []
    loaded = load_recipe(recipe, import_plugins=not dry_run)
    code = loaded.code() if dry_run else []
    if not dry_run:
        heed_signals()
        warm_up()
        changes += _own_data(loaded, scale, data_dir)
    plan = make_comparison(loaded, scale, changes, seed or None, check_names=not code)
    trials = plan.chosen(row or (), seed or ())
    folder = out / run_name(plan, settings or [])
    execution: dict[str, Any] = {
        "data_dir": data_dir,
        "accelerator": accelerator,
        "tensorboard": tensorboard,
        "keep_weights": weights,
    }
    execution |= {"loggers": tuple(logger or ())}
    if dry_run:
        from dampen.studies.tuning import tuning_plan

        tuning = tuning_plan(loaded, scale, changes, row or [], check_names=not code)
        _preview(plan, folder, as_json, tuning, row or (), seed or ())
        if code:
            told = f"A dry run imports no code that a recipe names: {', '.join(code)}."
            told += " So the names of data sets, models and methods, and their arguments, were not looked up. A plug-in may "
            told += "give the recipe, and with it the folder, another name."
            print(told, file=sys.stderr)
        return
    plan = tuned(loaded, plan, folder, execution, scale, changes, row or [], **chosen)
    trials = plan.chosen(row or (), seed or ())
    execute(plan, folder, trials, as_json, execution, [], retry=retry, **chosen)


def _own_data(recipe: Recipe, scale: str | None, data_dir: str | None) -> list[str]:
    """The setting that makes data of the user's own part of the trials: another
    folder is another trial."""
    from dampen.studies.request import fingerprint_of_set

    found = fingerprint_of_set(recipe.at(scale).get("data", {}).get("name", ""), data_dir)
    return [f'data.fingerprint="{found}"'] if found else []


def run_name(plan: Comparison, settings: list[str]) -> str:
    """The folder of a run. Settings make it another run: their trials do not belong in
    the recipe's own table."""
    name = f"{plan.name.replace('/', '-')}-{plan.scale}"
    return name + (
        f"-{hashlib.sha256(repr(sorted(settings)).encode()).hexdigest()[:8]}" if settings else ""
    )


def _preview(
    plan: Comparison,
    folder: Path,
    as_json: bool,
    tuning: Comparison | None,
    rows: Sequence[str],
    seeds: Sequence[int],
) -> None:
    from dampen.studies.tuning import as_large, count_runs

    points = sum(len(r.settings) for r in plan.configs)
    trials = {i: t.to_dict() for i, t in plan.runs.items()}
    table = plan if tuning is None else as_large(plan, tuning)
    first, count = count_runs(tuning), len(table.chosen(rows, seeds))
    if as_json:
        told = {
            "run": plan.name,
            "scale": plan.scale,
            "folder": str(folder),
            "trials": trials,
            "tuning": first,
        }
        print_json({**told, "chosen": count})
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{plan.name} at scale {plan.scale}: {len(plan.configs)} rows, "
        f"{points} grid points, seeds {plan.seeds}",
        markup=False,
    )
    trials_told = (
        f"{first} runs for selection on validation, then {count}" if first else f"{count} trials"
    )
    console.print(f"{trials_told} would run in {folder}. Cost: {plan.header['cost']}", markup=False)
    for departure in plan.departures:
        console.print(f"  departure: {departure}", markup=False)


NEXT = [
    'dampen compare --data FOLDER_OF_IMAGES --methods "patch_dropout, '
    'drop_key" --until-decided    # your own data',
    'dampen compare train.py:train --methods "drop_key, r_drop + drop_head" '
    "--tune 10 --metric accuracy    # your loop",
    "dampen show drop_key    # formula, paper, arguments",
]
"""What to type after the demo."""


@command("dampen demo\ndampen demo --seeds 12\ndampen demo --json")
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds per method.")] = 8,
    workers: Workers = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the runs of an earlier demo.")
    ] = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Compare one method per idea with the plain model on few handwritten digits;
    offline, a few minutes."""
    import shutil

    from dampen.cli.running import execute
    from dampen.studies.catalog import catalog
    from dampen.studies.comparison import make_comparison
    from dampen.studies.processes import warm_up
    from dampen.studies.recipe import demo_recipe

    warm_up()
    folder = out / "demo"
    if fresh and folder.is_dir():
        shutil.rmtree(folder)
    plan = make_comparison(demo_recipe(list(catalog()), seeds))
    execute(plan, folder, plan.chosen(), as_json, {"accelerator": "cpu"}, NEXT, workers=workers)
