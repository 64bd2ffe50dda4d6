"""`dampen bench`: what each method costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from dampen.cli.common import Json, command, print_json


@command(
    """dampen bench
dampen bench --size tiny
dampen bench --batch 16 --methods drop_key,explicit_dropout
dampen bench --methods "drop_key(rate=0.3), drop_path + drop_head" --rounds 9
dampen bench --model timm/vit_tiny_patch16_224 --batch 8 --dtype bfloat16 --seconds 300
dampen bench --long -o bench.json --chart bench.svg"""
)
def bench(
    size: Annotated[
        str, typer.Option(help="tiny, small, mid or long: a model, rows and targets that belong together, one thread.")
    ] = "",
    model: Annotated[
        str | None, typer.Option(help="vit (the default), 'vit(depth=4)', encoder, language, or timm/NAME.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples per step; default 64, or the size's.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 and float16 by autocast.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU; default: all.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Only these, separated by commas; name(argument=value) is a row of its own.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most; ends before when all intervals are narrow.")] = 25,
    seconds: Annotated[float, typer.Option(min=0, help="Ends after the round in which this time is over.")] = 600.0,
    clock: Annotated[
        str | None,
        typer.Option(help="wall (default), or cpu: processor time, for a busy machine with --threads 1."),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Also attention alone over its length, and steps over the batch.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the record here, as JSON.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a chart here: .svg, .png or .html.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a training step with each method against the best plain step, beside the papers' own formulations."""
    from dampen.studies.allocator import keep_freed_memory
    from dampen.studies.bench import Options, bench
    from dampen.studies.bench.output import CHARTS, remarks, results_table, save_chart, scaling_table
    from dampen.studies.errors import ConfigError
    from dampen.studies.files import write_json

    if clock not in (None, "wall", "cpu"):
        raise ConfigError("The bench", [f"--clock: got {clock!r}; use wall or cpu"])
    if chart is not None and chart.suffix not in CHARTS:
        raise ConfigError("The bench", [f"--chart: got {chart.name!r}; the name ends in {', '.join(CHARTS)}"])
    chosen = {"model": model, "batch": batch, "threads": threads, "methods": methods, "clock": clock}
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    given |= {"dtype": dtype, "device": device, "rounds": rounds, "seconds": seconds, "long": long}
    options = Options.preset(size, **given) if size else Options(**given)
    keep_freed_memory()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        record = bench(
            options, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    if chart is not None:
        save_chart(record, chart)
    if output is not None:
        write_json(output, record)
    if as_json:
        print_json(record)
        return
    console = Console(highlight=False)
    if "ratios" not in record:  # attention alone
        console.print(scaling_table(record))
        for row, goal in record["targets"].items():
            console.print(f"{row}: target {goal['target']:.2f}, {'met' if goal['met'] else 'not met'}", markup=False)
        return
    console.print(results_table(record))
    for remark in remarks(record):
        console.print(remark, soft_wrap=True, markup=False)
    if long:
        console.print(scaling_table(record))
        for name, reason in record["scaling"]["stopped"].items():
            console.print(f"{name}: {reason}", soft_wrap=True, markup=False)
