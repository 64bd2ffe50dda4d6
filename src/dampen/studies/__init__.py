"""The lab: train, compare, measure and report on real data, from one command.

From Python, a trial is plain data and `run_trial` a pure function of it:

    from dampen.studies import TrialSpec, run_trial
    trial = TrialSpec.from_dict({"data": {"name": "digits"}, "model": {"name": "vit", "patch_size": 2, "width": 48},
                             "methods": [{"name": "drop_key", "rate": 0.3}], "train": {"epochs": 5}})
    result = run_trial(trial, "runs/mine")

Read `training/train.py` for the way of a batch, `config/trial.py` for what can be set, `records/record.py` for what is
written where.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.studies.config.plan import Plan, make_plan
    from dampen.studies.config.recipe import Recipe, list_recipes, load_recipe
    from dampen.studies.config.trial import TrainOptions, TrialSpec
    from dampen.studies.engines.runner import RunResult, run_plan
    from dampen.studies.trainer.state import Execution
    from dampen.studies.trainer.train import run_trial

__all__ = [
    "Execution",
    "Plan",
    "Recipe",
    "RunResult",
    "TrainOptions",
    "TrialSpec",
    "list_recipes",
    "load_recipe",
    "make_plan",
    "run_plan",
    "run_trial",
]

_HOMES = {
    "config.plan": ("Plan", "make_plan"),
    "config.recipe": ("Recipe", "list_recipes", "load_recipe"),
    "engines.runner": ("RunResult", "run_plan"),
    "trainer.state": ("Execution",),
    "trainer.train": ("run_trial",),
    "config.trial": ("TrainOptions", "TrialSpec"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command reads recipes without waiting for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"dampen.studies.{module}"), name)
    raise AttributeError(f"module 'dampen.studies' has no attribute {name!r}")
