"""The lab: train, compare, measure and report on real data, from one command.

From Python, a trial is plain data and `run_trial` a pure function of it:

    from dampen.lab import Trial, run_trial
    trial = Trial.from_dict({"data": {"name": "digits"}, "model": {"name": "vit", "patch_size": 2, "width": 48},
                             "methods": [{"name": "drop_key", "rate": 0.3}], "train": {"epochs": 5}})
    result = run_trial(trial, "runs/mine")

Read `train.py` for the way of a batch, `trial.py` for what can be set, `record.py` for what is written where.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.lab.plan import Plan, make_plan
    from dampen.lab.recipe import Recipe, list_recipes, load_recipe
    from dampen.lab.runner import Run, run_plan
    from dampen.lab.session import Execution
    from dampen.lab.train import run_trial
    from dampen.lab.trial import TrainOptions, Trial

__all__ = [
    "Execution",
    "Plan",
    "Recipe",
    "Run",
    "TrainOptions",
    "Trial",
    "list_recipes",
    "load_recipe",
    "make_plan",
    "run_plan",
    "run_trial",
]

_HOMES = {
    "plan": ("Plan", "make_plan"),
    "recipe": ("Recipe", "list_recipes", "load_recipe"),
    "runner": ("Run", "run_plan"),
    "session": ("Execution",),
    "train": ("run_trial",),
    "trial": ("TrainOptions", "Trial"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command reads recipes without waiting for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"dampen.lab.{module}"), name)
    raise AttributeError(f"module 'dampen.lab' has no attribute {name!r}")
