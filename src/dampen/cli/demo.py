"""`dampen demo`: the main job on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dampen.cli.common import Json, Out, Workers, command


@command("dampen demo\ndampen demo --seeds 5\ndampen demo --json")
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds per method.")] = 3,
    workers: Workers = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the trials of an earlier demo.")] = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Compare one method of every family with the plain model on handwritten digits; offline, a few minutes."""
    import shutil

    from dampen.cli.running import execute
    from dampen.lab.catalog import catalog
    from dampen.lab.demo import demo_recipe
    from dampen.lab.plan import make_plan
    from dampen.lab.processes import warm_up

    warm_up()
    folder = out / "demo"
    if fresh and folder.is_dir():
        shutil.rmtree(folder)
    plan = make_plan(demo_recipe(list(catalog()), seeds))
    steps = [
        'dampen compare --data digits --methods "drop_key(rate=0.1), drop_key(rate=0.3)" --seeds 10',
        "dampen show drop_key   # formula, paper, arguments",
        "dampen list recipes    # the papers' tables",
    ]
    page = folder / "report.html"
    execute(plan, folder, plan.chosen(), as_json, {"accelerator": "cpu"}, steps, page, workers=workers)
