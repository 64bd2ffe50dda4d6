"""`dampen compare`: a fair comparison without a recipe, of the built-in trainer or of your own
training function."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dampen.cli.common import (
    DATA,
    JUDGING,
    RUNNING,
    WHAT,
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
    Budget,
    Margin,
    NoReport,
    SearchBy,
    Title,
    Tune,
    UntilDecided,
    engine_options,
    refuse_search,
    tuned,
)
from dampen.studies.errors import ConfigError

if TYPE_CHECKING:
    from dampen.studies.request import ComparisonRequest


@command(
    """dampen compare train.py:train --methods "drop_key(rate=0.2), r_drop + drop_head" --seeds 8 --set lr=0.001
dampen compare train.py:train --methods "drop_key, params(weight_decay=0.1)" --metric f1 --dry-run
dampen compare --data photos --model timm/vit_tiny_patch16_224 --methods drop_key
dampen compare --data reviews.csv --model hf/FOLDER --methods "drop_key(rate=0.1), drop_head" --seeds 5
dampen compare --data digits --methods drop_key,drop_attention --seeds 5
dampen compare --data my_images --model "vit(width=64, depth=4)" --methods drop_key
dampen compare --data digits --methods drop_key,drop_path --until-decided --budget 30m --margin 0.5 --tune 10
dampen compare --data digits --methods drop_key --engine ray --address auto"""
)
def compare(
    train: Annotated[
        str | None,
        typer.Argument(
            help="Training function as FILE.py:FUNCTION (default: the built-in trainer)."
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas; a + b puts both into one model.",
            rich_help_panel=WHAT,
        ),
    ] = "drop_key",
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set (dampen data list), a path, or "
            "FILE.py:FUNCTION; several with commas. Default: digits.",
            rich_help_panel=DATA,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="vit, 'vit(depth=4)', timm/NAME, hf/FOLDER, "
            "FILE.py:FUNCTION; default: one that fits.",
            rich_help_panel=DATA,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="How many seeds per method.", rich_help_panel=JUDGING)
    ] = 8,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The test metric to judge by, as in f1 or rmse:min; default: the first returned.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    settings: Settings = None,
    ignore_code_change: Annotated[
        bool,
        typer.Option(
            "--ignore-code-change",
            help="Count runs that an older version of your code logged.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Cross-validate in so many folds; each seed is one round of them.",
            rich_help_panel=DATA,
        ),
    ] = None,
    data_dir: DataDir = None,
    allow_incomplete: AllowIncomplete = False,
    accelerator: Annotated[
        str, typer.Option(help="auto, cpu, cuda or mps.", rich_help_panel=RUNNING)
    ] = "auto",
    engine: Annotated[
        str, typer.Option(help="Where runs execute: local or ray.", rich_help_panel=RUNNING)
    ] = "local",
    address: Address = None,
    workers: Workers = None,
    per_gpu: PerGpu = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of each run; default: OMP_NUM_THREADS, or the cores shared out.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    until_decided: UntilDecided = False,
    budget: Budget = None,
    margin: Margin = None,
    tune: Tune = None,
    search: SearchBy = None,
    tensorboard: Tensorboard = False,
    logger: Loggers = None,
    weights: Weights = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all, time a few steps, and show what would run.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    title: Title = None,
    no_report: NoReport = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Train the baseline and each method with the same seeds, data and options, and
    test which is better."""
    if train is None and data is not None and "," in data and not Path(data).exists():
        _over_data_sets([name.strip() for name in data.split(",") if name.strip()], dict(locals()))
        return
    from dampen.cli.running import execute, heed_signals
    from dampen.studies.processes import warm_up

    heed_signals()
    warm_up()
    from dampen.studies.compare import check_rows
    from dampen.studies.request import planned
    from dampen.studies.study import save_function, save_parts
    from dampen.studies.trainer.state import Execution

    refuse_search(search)
    tuning = tune is not None
    check_budget(budget)
    options = engine_options(engine, workers, address, per_gpu)
    if train is not None:
        refuse_options_of_the_trainer(
            {
                "--data": data,
                "--model": model,
                "--data-dir": data_dir,
                "--allow-incomplete": allow_incomplete,
                "--folds": folds,
                "--accelerator": accelerator != "auto",
            }
        )
        changes = settings or []
        asked = request_of_function(
            train, methods, seeds, metric, changes, ignore_code_change, out, tuning
        )
    else:
        from dampen.studies.request import request_parts

        if ignore_code_change:
            problem = (
                "only a training function, FILE.py:FUNCTION, has code whose changes can be ignored"
            )
            raise ConfigError("--ignore-code-change", [problem])
        changes = [*(settings or []), *(["data.partial=true"] if allow_incomplete else [])]
        places: dict[str, Any] = {"data_dir": data_dir, "out": out, "folds": folds}
        asked = request_parts(
            model, data or "digits", methods, seeds, metric=metric, settings=changes, **places
        )
    execution: dict[str, Any] = {
        "data_dir": data_dir,
        "accelerator": accelerator,
        "tensorboard": tensorboard,
    }
    execution |= {
        "loggers": tuple(logger or ()),
        "keep_weights": weights,
        "threads": threads,
        "function": asked.function,
        "parts": asked.parts,
    }
    if asked.remark:
        print(f"dampen: {asked.remark}", file=sys.stderr)
    if dry_run:
        from dampen.cli.compare import preview

        preview(asked, execution, workers, as_json, tune if tuning else None)
        return
    plan, folder = asked.plan, asked.folder
    if margin is not None:
        plan.header["margin"] = margin
    said = {"--margin": margin, "--tune": tune, "--budget": budget}
    words = [f" {name} {value}" for name, value in said.items() if value is not None]
    plan.header["command"] += "".join(words) + (" --until-decided" if until_decided else "")
    if options.get("engine", "local") == "local":
        Execution(**execution).check_here()  # before anything is written
    check_rows(plan, folder, Execution(**execution))
    steps: list[str] = []
    if title:
        plan.header["title"] = title
    if tuning:
        from dampen.studies.tuning import tuned_recipe

        folder, recipe = (
            folder.with_name(f"{folder.name}-tuned"),
            tuned_recipe(asked.recipe, tune or 0, asked.settings),
        )
        first = planned(recipe)
        first.header |= asked.plan.header
        plan = tuned(recipe, first, folder, execution, None, (), (), **options)
        execution["function"] = _named(asked, plan)
    if execution["function"] is not None:
        save_function(execution["function"], folder)
    elif asked.parts is not None:
        save_parts(asked.parts, folder, data_dir)
    if until_decided or budget is not None:
        from dampen.cli.running import race_and_conclude

        limits: dict[str, Any] = {"margin": margin, "budget": budget, "first": seeds}
        limits["report"] = not no_report
        race_and_conclude(plan, folder, as_json, execution, steps, **limits, **options)
    execute(
        plan,
        folder,
        plan.chosen() if tuning else asked.wanted,
        as_json,
        execution,
        steps,
        not no_report,
        **options,
    )


def _over_data_sets(names: list[str], given: dict[str, Any]) -> None:
    """One comparison for each data set, then the answer over all of them."""
    import contextlib

    from dampen.studies.combine import combine
    from dampen.studies.request import request_parts

    folders = []
    for name in names:
        with contextlib.redirect_stdout(sys.stderr if given["as_json"] else sys.stdout):
            try:
                compare(**given | {"data": name, "as_json": False})
            except typer.Exit as end:
                if end.exit_code:
                    raise
        changes = [
            *(given["settings"] or []),
            *(["data.partial=true"] if given["allow_incomplete"] else []),
        ]
        places = {key: given[key] for key in ("metric", "data_dir", "out", "folds")}
        asked = request_parts(
            given["model"], name, given["methods"], given["seeds"], settings=changes, **places
        )
        tuned = "-tuned" if given["tune"] is not None else ""
        folders.append(asked.folder.with_name(asked.folder.name + tuned))
    if given["dry_run"]:
        return
    found = combine(folders)
    if given["as_json"]:
        print_json(found.to_dict())
        return
    print(f"\n{found}")
    if not given["no_report"]:
        print(f"\nReport: {found.report(given['out'] / 'combined.html')}")


def check_budget(budget: str | None) -> None:
    """The words of a budget are checked before anything starts."""
    from dampen.studies.sequential import seconds

    if budget is not None:
        seconds(budget)


BRINGS = {
    "--data": "a training function brings its own",
    "--model": "a training function brings its own",
    "--data-dir": "a training function finds its own data",
    "--allow-incomplete": "a training function reads its own data",
    "--folds": "a training function splits its own data; it can take the fold from trial.seed",
    "--accelerator": "a training function chooses its own device",
}
"""Options of the built-in trainer, and why a user's training function cannot use them."""


def refuse_options_of_the_trainer(given: Mapping[str, Any]) -> None:
    """Refuse what would be passed over in silence.

    Args:
        given: the options and their values.
    """
    problems = [f"{name}: {BRINGS[name]}" for name, value in given.items() if value]
    if problems:
        raise ConfigError("The comparison", problems)


def request_of_function(
    train: str,
    methods: str | None,
    seeds: int,
    metric: str | None,
    settings: list[str],
    same_code: bool,
    out: Path,
    searching: bool,
) -> ComparisonRequest:
    """The comparison of a user's own training; without methods its baseline alone.

    Args:
        train: as FILE.py:FUNCTION.
        methods: as text.
        seeds: how many.
        metric: the metric to judge by.
        settings: what the function reads from `trial.params`, as KEY=VALUE.
        same_code: count runs of an older version of the code.
        out: the folder that holds the runs.
        searching: settings are tuned on validation, which needs a metric.
    """
    from dampen.studies.request import request_own
    from dampen.studies.trainer.user_function import function_in_file

    problems = []
    if searching and metric is None:
        told = "pass the validation metric of your function that --tune maximizes, as in --metric accuracy or nll:min"
        problems.append(f"--metric: {told}")
    if problems:
        raise ConfigError("The comparison", problems)
    said = ["compare", train, "--methods", methods] if methods else ["noise", train]
    command = ["dampen", *said, "--seeds", str(seeds)]
    command += ["--metric", metric] if metric else []
    command += [part for setting in settings for part in ("--set", setting)]
    function = function_in_file(train)
    return request_own(
        function,
        methods,
        seeds,
        metric=metric,
        settings=settings,
        out=out,
        same_code=same_code,
        command=command,
    )


def _named(asked: ComparisonRequest, plan: Any) -> Any:
    """The function with the rows of another comparison."""
    from dataclasses import replace

    if asked.function is None:
        return None
    names = plan.config_of_run()
    return replace(asked.function, rows=names)


def preview(
    asked: ComparisonRequest,
    execution: dict[str, Any],
    workers: int | None,
    as_json: bool,
    tune: int | None = None,
) -> None:
    """Take a few steps of every row and say what would run; exits with 1 if a row cannot."""
    from dampen.studies.compare import probe
    from dampen.studies.environment import usable_cores
    from dampen.studies.trainer.state import Execution
    from dampen.studies.tuning import count_runs, tuned_recipe, tuning_plan

    plan, folder = asked.plan, asked.folder
    first = (
        tuning_plan(tuned_recipe(asked.recipe, tune, asked.settings), None, (), ())
        if tune
        else None
    )
    tuning = count_runs(first)
    probes = probe(plan, Execution(**execution))
    left = [t.id for t in asked.wanted if not (folder / t.id / "final.json").exists()]
    at_once = workers or max(1, min(usable_cores(), len(left) or 1))
    known = {p.row: p.seconds for p in probes}
    rows = plan.config_of_run()
    each = [known[rows[i]] for i in left]
    total = (
        sum(s for s in each if s is not None) / at_once
        if all(s is not None for s in each)
        else None
    )
    identity = identities(asked)
    if as_json:
        told = [
            {"row": p.row, "problem": p.problem, "step_seconds": p.step_seconds, "steps": p.steps}
            for p in probes
        ]
        body = {
            "folder": str(folder),
            "trials": len(asked.wanted),
            "left": len(left),
            "seeds": plan.seeds,
            "tuning": tuning,
        }
        print_json({**body, "identity": identity, "rows": told, "seconds": total})
    else:
        console = Console(highlight=False, soft_wrap=True)
        counts = f"{len(asked.wanted)} trials, {len(asked.wanted) - len(left)} already logged"
        if tune:
            counts = f"{tuning} runs for selection on validation, then {len(asked.wanted)} trials"
        console.print(f"{plan.header['title']}: {counts}, in {folder}", markup=False)
        for name, value in identity.items():
            console.print(f"  {name}: {value}", markup=False)
        for p in probes:
            pace = (
                f"{1000 * p.step_seconds:.1f} ms a step"
                if p.step_seconds is not None
                else "no step was seen"
            )
            length = f", {p.steps} steps" if p.steps else ""
            console.print(
                f"  {p.row}: {'cannot run: ' + p.problem if p.problem else pace + length}",
                markup=False,
            )
        if total is not None:
            console.print(
                f"About {_words(total)} with {at_once} at once, evaluation not counted.",
                markup=False,
            )
    if any(p.problem for p in probes):
        raise typer.Exit(1)


def identities(asked: ComparisonRequest) -> dict[str, str]:
    """What each part of the trials is known by."""
    trial = asked.wanted[0]
    if trial.function is not None:
        found = {"function": f"{trial.function['name']}, code {trial.function['code']}"}
        return found | (
            {"params": str(trial.function["params"])} if trial.function["params"] else {}
        )
    found = {}
    for section in ("data", "model"):
        part: dict[str, Any] = getattr(trial, section)
        marks = [f"{key} {part[key]}" for key in ("fingerprint", "code") if key in part]
        found[section] = ", ".join([part.get("source", part["name"]), *marks])
    return found


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
