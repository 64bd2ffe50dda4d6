"""`dampen demo`: the main job on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dampen.cli.common import Json, Out, Workers, command

NEXT = [
    'dampen compare --data FOLDER_OF_IMAGES --methods "patch_dropout, drop_key" --until-decided    # your own data',
    'dampen compare train.py:train --methods "drop_key, r_drop + drop_head" --tune 10 --metric accuracy    # your loop',
    "dampen show drop_key    # formula, paper, arguments",
]
"""What to type after the demo."""


@command("dampen demo\ndampen demo --seeds 12\ndampen demo --json")
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds per method.")] = 8,
    workers: Workers = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the trials of an earlier demo.")] = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Compare one method per idea with the plain model on few handwritten digits; offline, a few minutes."""
    import shutil

    from dampen.cli.running import execute
    from dampen.studies.config.catalog import catalog
    from dampen.studies.config.demo import demo_recipe
    from dampen.studies.config.plan import make_comparison
    from dampen.studies.processes import warm_up

    warm_up()
    folder = out / "demo"
    if fresh and folder.is_dir():
        shutil.rmtree(folder)
    plan = make_comparison(demo_recipe(list(catalog()), seeds))
    page = folder / "report.html"
    execute(plan, folder, plan.chosen(), as_json, {"accelerator": "cpu"}, NEXT, page, workers=workers)
