"""`dampen compare`: the fair comparison without writing a recipe."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import typer

from dampen.cli.common import DataDir, Json, Out, Settings, Weights, Workers, command
from dampen.cli.searching import Address, SearchBy, SearchTrials, Storage, check_search, engine_options, searched


@command(
    """dampen compare --data digits --methods drop_key,drop_attention --seeds 5
dampen compare --data digits --methods "drop_key(rate=linear(0.3, 0.0)), drop_key + feed_forward_dropout"
dampen compare --data cifar10 --data-dir data --partial --model "vit(width=64, depth=4)" --methods drop_key
dampen compare --data fsdd --methods drop_key --seeds 1 --set train.epochs=5
dampen compare --data digits --methods drop_key,drop_path --search optuna --search-trials 20
dampen compare --data digits --methods drop_key --engine ray --address auto"""
)
def compare(
    data: Annotated[str, typer.Option(help="The data set (dampen data list).")] = "digits",
    model: Annotated[
        str | None, typer.Option(help="A model: vit, 'vit(depth=4)', timm/NAME; default: one that fits.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Rows, separated by commas; a + b puts both into one model.")
    ] = "drop_key",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds per method.")] = 5,
    settings: Settings = None,
    data_dir: DataDir = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept an incomplete copy of the data; recorded.")
    ] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    engine: Annotated[str, typer.Option(help="Where trials run: local or ray.")] = "local",
    address: Address = None,
    workers: Workers = None,
    search: SearchBy = None,
    search_trials: SearchTrials = 20,
    storage: Storage = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard scalars too.")] = False,
    weights: Weights = True,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Train the plain model and each method with the same seeds, data and options; say which is better."""
    from dampen.cli.running import execute
    from dampen.lab.compare import comparison
    from dampen.lab.plan import Plan, make_plan
    from dampen.lab.processes import warm_up
    from dampen.lab.record import Record

    warm_up()
    check_search(search)
    options = engine_options(engine, workers, address)
    changes = [*(settings or []), *(["data.partial=true"] if partial else [])]
    recipe = comparison(data, model, methods, seeds, changes)
    plan = make_plan(recipe, settings=changes)
    kind = {k: v for k, v in next(iter(plan.trials.values())).canonical().items() if k not in ("seed", "methods")}
    mark = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]  # same conditions, same folder
    folder = out / f"{plan.name}-{mark}"
    execution = {"data_dir": data_dir, "accelerator": accelerator, "tensorboard": tensorboard, "keep_weights": weights}
    steps = ["more seeds tell smaller differences apart: the same command with a larger --seeds keeps what is recorded"]
    if search:
        folder = folder.with_name(f"{folder.name}-search")
        plan = searched(recipe, folder, execution, search_trials, storage, workers, settings=changes)
    trials = plan.chosen()
    if not search and (folder / "plan.json").exists():
        earlier = Plan.load(folder)
        plan = plan.joined(earlier, {i for i in earlier.trials if Record(folder / i).final() is not None})
    execute(plan, folder, trials, as_json, execution, steps, **options)
