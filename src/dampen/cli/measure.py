"""`dampen bench`: what each method costs. `dampen diagnose`: a trained model. `dampen doctor`: what
is installed."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from dampen.cli.common import AllowIncomplete, DataDir, Json, Out, command, print_json


@command(
    """dampen bench
dampen bench --size tiny
dampen bench --batch 16 --methods drop_key,explicit_dropout
dampen bench --methods "drop_key(rate=0.3), drop_path + drop_head" --rounds 9
dampen bench --model timm/vit_tiny_patch16_224 --batch 8
dampen bench --model hf/saved/bert --batch 16
dampen bench --model my_model.py:build --batch 8 --methods "drop_path, hard_masking"
dampen bench --long -o bench.json --chart bench.svg"""
)
def bench(
    size: Annotated[
        str,
        typer.Option(
            help="tiny, small, mid or long: a model with methods and targets, on one thread."
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="vit (the default), 'vit(depth=4)', encoder, language, timm/NAME, a saved "
            "hf/FOLDER, or file.py:build, which returns (model, inputs)."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples per step; default 64, 8 in a short time, or the size's."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 and float16 by autocast.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU; default: all.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these, separated by commas, as name or name(argument=value)."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds at most; ends before when all intervals are narrow.")
    ] = 25,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="For everything, set-up too; default 600, or 45 for a model of your own. Rows "
            "that do not fit are named. Under 30: one row per method.",
        ),
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(
            help="wall (default), or cpu: processor time, for a busy machine with --threads 1."
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Also attention alone over its length, and steps over the batch."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result file here, as JSON.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Write a chart here: .svg, .png or .html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a training step with each method against the faster step of the
    baseline, fused or unfused."""
    started = time.perf_counter()  # set-up counts, and so do imports
    from dampen.studies.bench import Options, bench
    from dampen.studies.bench.budget import SHORT_BATCH, is_short
    from dampen.studies.bench.run import (
        CHARTS,
        remarks,
        results_table,
        save_chart,
        scaling_table,
    )
    from dampen.studies.bench.subject import METHODS, SECONDS, is_own
    from dampen.studies.errors import ConfigError
    from dampen.studies.files import write_json
    from dampen.studies.processes import keep_freed_memory
    from dampen.studies.report.terminal import console_for

    if clock not in (None, "wall", "cpu"):
        raise ConfigError("The bench", [f"--clock: got {clock!r}; use wall or cpu"])
    if chart is not None and chart.suffix not in CHARTS:
        raise ConfigError(
            "The bench", [f"--chart: got {chart.name!r}; the name ends in {', '.join(CHARTS)}"]
        )
    chosen = {
        "model": model,
        "batch": batch,
        "threads": threads,
        "methods": methods,
        "clock": clock,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    own = model is not None and methods is None and not long and is_own(model)
    if own:
        given["methods"] = METHODS
    given |= {"dtype": dtype, "device": device, "rounds": rounds, "long": long}
    given["seconds"] = seconds if seconds is not None else SECONDS if own else 600.0
    if batch is None and not size and not own and is_short(given["seconds"]):
        given["batch"] = SHORT_BATCH
    options = Options.preset(size, **given) if size else Options(**given)
    keep_freed_memory()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        record = bench(
            options,
            lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
            started,
        )
    if chart is not None:
        save_chart(record, chart)
    if output is not None:
        write_json(output, record)
    if as_json:
        print_json(record)
        return
    console = console_for()
    if "ratios" not in record:  # attention alone
        console.print(scaling_table(record))
        for row, goal in record["targets"].items():
            console.print(
                f"{row}: target {goal['target']:.2f}, {'met' if goal['met'] else 'not met'}",
                markup=False,
            )
        return
    console.print(results_table(record))
    for remark in remarks(record):
        console.print(remark, markup=False)
    if long:
        console.print(scaling_table(record))
        for name, reason in record["scaling"]["stopped"].items():
            console.print(f"{name}: {reason}", soft_wrap=True, markup=False)


@command(
    """dampen diagnose runs/demo
dampen diagnose runs/demo/4ce5e0f2a0b1c2d3 --only calibration,attention
dampen diagnose my_package.models:trained --data digits
dampen diagnose weights.pt --model "vit(patch_size=2, width=48)" --data digits --json"""
)
def diagnose(
    what: Annotated[
        str, typer.Argument(help="A study or run folder, module:function, or a file of weights.")
    ],
    data: Annotated[
        str | None, typer.Option(help="The data set, for a model that dampen did not train.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What a file of weights belongs to: vit, 'vit(depth=4)'.")
    ] = None,
    data_dir: DataDir = None,
    allow_incomplete: AllowIncomplete = False,
    only: Annotated[
        str | None, typer.Option(help="Only these sections, separated by commas.")
    ] = None,
    examples: Annotated[
        int, typer.Option(min=2, help="Examples of test and training at most.")
    ] = 1000,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option of a plug-in's section: robustness.eps=2,8."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured before.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Approve the plug-ins and methods in files of a study.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the diagnosis here too; pictures go beside it as PNG.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy, calibration, gradients, attention, conditioning and generalization.

    A run's diagnosis is kept in its folder as diagnose.json, where `dampen report` finds it.
    Sections that were measured before stay."""
    from dampen.extensions import hint
    from dampen.studies.diagnose import SECTIONS, Settings
    from dampen.studies.errors import ConfigError
    from dampen.studies.files import write_json

    chosen = [name.strip() for name in only.split(",")] if only else []
    problems = [
        f"--only: there is no section {n!r}{hint('dampen.diagnoses', n, SECTIONS)}"
        for n in chosen
        if n not in SECTIONS
    ]
    problems += [
        f"--set: expected SECTION.OPTION=VALUE, got {change!r}"
        for change in changes or ()
        if not re.fullmatch(r"\w+\.\w+=.+", change)
    ]
    if problems:
        raise ConfigError("dampen diagnose", problems)
    options = dict(change.split("=", 1) for change in changes or ())
    settings = Settings(examples=examples, options=options)
    picture = None if output is None else output.with_suffix(".png")
    results = _results(
        what, settings, chosen, data, model, data_dir, allow_incomplete, fresh, picture, trust
    )
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
    trust: bool,
) -> list[dict[str, Any]]:
    from dampen.studies.diagnose import diagnose, find_trials, from_model, from_run
    from dampen.studies.diagnose.measure import keep, kept

    folders = find_trials(Path(what), trust) if Path(what).is_dir() else []
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
                diagnose(
                    trained,
                    settings,
                    only,
                    lambda s, d, n: bar.update(task, description=s, completed=d, total=n),
                )
            )
    return results


def _print(results: list[dict[str, Any]], what: str) -> None:
    from dampen.studies.diagnose.measure import FEW, diagnosis_table, layers_table

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


@command(
    "dampen doctor\ndampen doctor --data-dir data "
    "--json\ndampen doctor --build\ndampen doctor --gpu"
)
def doctor(
    data_dir: DataDir = None,
    out: Out = Path("runs"),
    tune: Annotated[bool, typer.Option("--tune", hidden=True)] = False,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="First build the native kernels for this processor, unless they are there.",
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Compare the GPU kernels with dense attention; writes dampen-gpu.json."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what is installed, which devices, kernels and data sets there are; exit code 1 if
    something is wrong."""
    from dampen.studies.doctor import examine, summary, to_json

    if build:
        _build()
    if tune:
        typer.echo(
            "--tune was removed: a table measured here "
            "gained less than 5 % of a step. Leave it out.",
            err=True,
        )
    findings = examine(data_dir, out)
    if gpu:
        from dampen.studies.doctor import try_gpu

        findings += try_gpu(Path("dampen-gpu.json"))
    if as_json:
        print_json(to_json(findings))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for folded in (False, False, True):
            table.add_column(overflow="fold", no_wrap=not folded)
        for f in findings:
            remedy = f" -> {f.remedy}" if f.remedy else ""
            table.add_row(f"[{STATES[f.state]}]{f.state}", escape(f.what), escape(f.found + remedy))
        console = Console(highlight=False)
        console.print(table)
        console.print(summary(findings), markup=False)
    if not all(f.ok for f in findings):
        raise typer.Exit(1)


STATES = {"ok": "green", "optional": "yellow", "problem": "red"}
"""The color of each state of a finding."""


def _build() -> None:
    from dampen.native.library import BuildError, build

    try:
        build()
    except BuildError as error:  # nobody needs them: everything runs on torch alone
        Console(stderr=True, highlight=False).print(
            f"native kernels were not built: {escape(str(error))}"
        )
