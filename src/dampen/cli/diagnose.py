"""`dampen diagnose`: everything that can be measured on a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from dampen.cli.common import DataDir, Json, command, print_json


@command(
    """dampen diagnose runs/demo
dampen diagnose runs/demo/4ce5e0f2a0b1c2d3 --only calibration,robustness --eps 2,8
dampen diagnose my_package.models:trained --data digits
dampen diagnose weights.pt --model "vit(patch_size=2, width=48)" --data digits --json"""
)
def diagnose(
    what: Annotated[str, typer.Argument(help="A run or trial folder, module:function, or a file of weights.")],
    data: Annotated[str | None, typer.Option(help="The data set, for a model that the lab did not train.")] = None,
    model: Annotated[str | None, typer.Option(help="What a file of weights belongs to: vit, 'vit(depth=4)'.")] = None,
    data_dir: DataDir = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept an incomplete copy of --data.")] = False,
    only: Annotated[str | None, typer.Option(help="Only these sections, separated by commas.")] = None,
    examples: Annotated[int, typer.Option(min=2, help="Examples of test and training at most.")] = 1000,
    attack_examples: Annotated[int, typer.Option(min=1, help="Examples that are attacked, at most.")] = 256,
    eps: Annotated[str, typer.Option(help="Sizes of the attacks, in 1/255 of the pixels' range.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(min=1, help="Steps of PGD, each of eps / 4.")] = 10,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the diagnosis here too; a model's attention maps go beside it as PNG."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy, calibration, robustness, gradients, attention, conditioning and generalization.

    A trial's diagnosis is kept in its folder as diagnose.json, where `dampen report` finds it, with its attention maps
    as pictures; sections that were measured before stay."""
    from dampen.studies.diagnose import SECTIONS, Settings
    from dampen.studies.errors import ConfigError
    from dampen.studies.files import write_json

    chosen = [name.strip() for name in only.split(",")] if only else []
    problems = [
        f"--only: there is no section {n!r}; known are {', '.join(SECTIONS)}" for n in chosen if n not in SECTIONS
    ]
    try:
        sizes = tuple(float(e) for e in eps.split(","))
    except ValueError:
        problems.append(f"--eps: expected numbers separated by commas, got {eps!r}")
    else:
        if not all(0 < e < float("inf") for e in sizes):
            problems.append(f"--eps: sizes of attacks are positive, in 1/255 of the pixels' range, got {eps}")
    if problems:
        raise ConfigError("dampen diagnose", problems)
    settings = Settings(examples=examples, attack_examples=attack_examples, eps=sizes, steps=steps)
    picture = None if output is None else output.with_suffix(".png")
    results = _results(what, settings, chosen, data, model, data_dir, partial, fresh, picture)
    if output is not None:
        write_json(output, results[0] if len(results) == 1 else results)
    if as_json:
        print_json(results)
    else:
        _print(results, what)


def _results(
    what: str,
    settings: Any,
    only: list[str],
    data: str | None,
    model: str | None,
    data_dir: str | None,
    partial: bool,
    fresh: bool,
    picture: Path | None,
) -> list[dict[str, Any]]:
    from dampen.studies.diagnose import diagnose, find_trials, from_model, from_run
    from dampen.studies.diagnose.stored import keep, kept

    folders = find_trials(Path(what)) if Path(what).is_dir() else []
    results = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        for i, folder in enumerate(folders):
            told = f"trial {i + 1} of {len(folders)}"
            found = None if fresh else kept(folder, settings, only)
            if found is None:
                trained = from_run(folder, data_dir)

                def show(section: str, done: int, total: int, told: str = told) -> None:
                    bar.update(task, description=f"{told}: {section}", completed=done, total=total)

                found = keep(folder, diagnose(trained, settings, only, show))
            results.append(found)
        if not folders:
            trained = from_model(what, data, model, data_dir, partial)
            trained.picture = picture
            results.append(
                diagnose(trained, settings, only, lambda s, d, n: bar.update(task, description=s, completed=d, total=n))
            )
    return results


def _print(results: list[dict[str, Any]], what: str) -> None:
    from dampen.studies.diagnose.output import FEW, diagnosis_table, layers_table

    console = Console(highlight=False)
    console.print(diagnosis_table(results))
    if len(results) == 1:
        layers = layers_table(results[0])
        if layers is not None:
            console.print(layers)
    said = {f"{section}: {reason}" for r in results for section, reason in r["skipped"].items()}
    for line in sorted(said):
        console.print(f"Not measured: {line}", soft_wrap=True, markup=False)
    if len(results) > FEW:
        console.print("All numbers of every model: --json, or the report.", soft_wrap=True)
    if Path(what).is_dir():
        console.print(f"Next: dampen report {what}", soft_wrap=True, markup=False)
