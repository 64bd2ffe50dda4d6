"""The fair comparison without writing a recipe: the same data, model, seeds and options for every method."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from dampen.lab.check import nearest
from dampen.lab.errors import ConfigError
from dampen.lab.presets import preset
from dampen.lab.recipe import Recipe, merge
from dampen.lab.specs import parse_rows

PLAIN = "plain"


def comparison(data: str, model: str | None, methods: str, seeds: int, settings: Sequence[str] = ()) -> Recipe:
    """A recipe that compares methods with the plain model; all is written as on the command line.

    `settings` are only noted in the command that repeats it; `make_plan` applies them.

    >>> recipe = comparison("digits", "vit(depth=2)", "drop_key(rate=0.3), drop_attention + drop_key", 5)
    >>> [row["name"] for row in recipe.rows]
    ['plain', 'drop_key(rate=0.3)', 'drop_attention + drop_key']
    >>> recipe.base["model"]["depth"], recipe.base["model"]["width"]
    (2, 48)
    """
    from dampen.lab.build import task_of
    from dampen.lab.data import DATASETS
    from dampen.lab.metrics import PRIMARY

    problems = [] if data in DATASETS else [f"--data: unknown data set {data!r}{nearest(data, DATASETS)}"]
    if seeds < 1:
        problems.append(f"--seeds: must be 1 or more, got {seeds}")
    rows = {name: specs for name, specs in parse_rows(methods).items() if specs}
    if problems:
        raise ConfigError("The comparison", problems)
    base: dict[str, Any] = merge({"data": {"name": data}}, preset(data))
    if model is not None:
        base = merge(base, {"model": _model(model)})
    command = ["dampen", "compare", "--data", data, *(["--model", model] if model is not None else [])]
    command += ["--methods", methods, "--seeds", str(seeds), *(part for s in settings for part in ("--set", s))]
    title = f"{data}: {base['model']['name']}, {seeds} seeds"
    return Recipe(
        name=f"compare-{data}-{base['model']['name'].replace('/', '-')}",
        title=title,
        paper="",
        table="",
        cost="",
        command=shlex.join(command),
        departures=[],
        metric=PRIMARY[task_of(data, base["model"]["name"])][0],
        base={**base, "seeds": list(range(seeds))},
        rows=[{"name": PLAIN, "methods": [], "baseline": True}, *({"name": n, "methods": m} for n, m in rows.items())],
        scales={"laptop": {}},
    )


def _model(text: str) -> dict[str, Any]:
    """`vit` or `vit(width=64)` or `timm/vit_tiny_patch16_224`."""
    if text.startswith("timm/"):
        name, _, arguments = text.partition("(")
        return {**_model(f"x({arguments}" if arguments else "x"), "name": name}
    parsed = list(parse_rows(text).values())
    if len(parsed) != 1 or len(parsed[0]) != 1:
        raise ConfigError("--model", [f"cannot read {text!r}: write name or name(argument=value)"])
    return parsed[0][0]
