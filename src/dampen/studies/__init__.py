"""Studies: train, compare, measure and report on real data, from one command.

From Python, a trial is plain data and `run_trial` a pure function of it:

    from dampen.studies import Run, run_trial
    trial = Run.from_dict({"data": {"name": "digits"}, "model": {"name": "vit",
    "patch_size": 2, "width": 48},
                             "methods": [{"name": "drop_key", "rate": 0.3}],
                             "train": {"epochs": 5}})
    result = run_trial(trial, "runs/mine")

Read `trainer/train.py` for the way of a batch, `run.py` for what can be set, `store.py` for what is
written where.

The names here read results too: `make_report` opens run folders and result files, `judge_pairs`
compares runs seed by seed, and the rest is what the repository's own pages are made with.
`dampen.studies.plugins` adds data sets, models, tasks, metrics and recipes.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dampen.studies.comparison import Comparison as Comparison
    from dampen.studies.comparison import make_comparison as make_comparison
    from dampen.studies.data.sets import load as load_data
    from dampen.studies.diagnose.trained import Trained as Trained
    from dampen.studies.diagnose.trained import from_run as trained_model
    from dampen.studies.engines.runner import ComparisonResult as ComparisonResult
    from dampen.studies.engines.runner import run_comparison as run_comparison
    from dampen.studies.environment import describe as describe_machine
    from dampen.studies.errors import LabError as LabError
    from dampen.studies.files import checksum as checksum
    from dampen.studies.files import write_json as write_json
    from dampen.studies.methods_text import methods_as_text as methods_as_text
    from dampen.studies.metric import Metric as Metric
    from dampen.studies.metric import describe as describe_metric
    from dampen.studies.pairing import PAPER_SEEDS as PAPER_SEEDS
    from dampen.studies.pairing import effect_agreement as effect_agreement
    from dampen.studies.recipe import Recipe as Recipe
    from dampen.studies.recipe import list_recipes as list_recipes
    from dampen.studies.recipe import load_recipe as load_recipe
    from dampen.studies.report import Report as Report
    from dampen.studies.report import make_report as make_report
    from dampen.studies.report import write_report as write_report
    from dampen.studies.report.charts import forest as forest
    from dampen.studies.report.charts import results as results_chart
    from dampen.studies.report.figures import Palette as Palette
    from dampen.studies.report.packs import packed_bytes as packed_bytes
    from dampen.studies.report.packs import packed_text as packed_text
    from dampen.studies.report.packs import to_text as to_text
    from dampen.studies.report.summary import Advice as Advice
    from dampen.studies.report.summary import advise as advise
    from dampen.studies.report.summary import smallest_difference as smallest_difference
    from dampen.studies.run import Run as Run
    from dampen.studies.run import TrainOptions as TrainOptions
    from dampen.studies.stats import FEWEST as FEWEST_SEEDS
    from dampen.studies.stats import LEVEL as LEVEL
    from dampen.studies.stats import Summary as Summary
    from dampen.studies.stats import detectable as detectable
    from dampen.studies.stats import deviation as deviation
    from dampen.studies.stats import paired_differences as paired_differences
    from dampen.studies.stats import paired_interval as paired_interval
    from dampen.studies.stats import summarize as summarize
    from dampen.studies.stats import t_quantile as t_quantile
    from dampen.studies.store import RunStore as RunStore
    from dampen.studies.table import Entry as Entry
    from dampen.studies.table import ResultTable as ResultTable
    from dampen.studies.table import grid_text as grid_text
    from dampen.studies.trainer.state import Execution as Execution
    from dampen.studies.trainer.train import run_trial as run_trial
    from dampen.studies.verdict import Verdict as Verdict
    from dampen.studies.verdict import judge as judge
    from dampen.studies.verdict import judge_pairs as judge_pairs
    from dampen.studies.verdict import sentence as sentence
    from dampen.studies.verdict import words as words

_HOMES = {
    "comparison": "Comparison make_comparison",
    "recipe": "Recipe list_recipes load_recipe",
    "run": "TrainOptions Run",
    "data.sets": "load_data=load",
    "diagnose.trained": "Trained trained_model=from_run",
    "engines.runner": "ComparisonResult run_comparison",
    "errors": "LabError",
    "files": "checksum write_json",
    "environment": "describe_machine=describe",
    "methods_text": "methods_as_text",
    "metric": "Metric describe_metric=describe",
    "pairing": "PAPER_SEEDS effect_agreement",
    "store": "RunStore",
    "stats": (
        "FEWEST_SEEDS=FEWEST LEVEL Summary detectable deviation "
        "paired_differences paired_interval summarize t_quantile"
    ),
    "table": "Entry ResultTable grid_text",
    "verdict": "Verdict judge judge_pairs sentence words",
    "report": "Report make_report write_report",
    "report.summary": "Advice advise smallest_difference",
    "report.charts": "forest results_chart=results",
    "report.figures": "Palette",
    "report.packs": "packed_bytes packed_text to_text",
    "trainer.state": "Execution",
    "trainer.train": "run_trial",
}
"""Module -> the public names from there; `public=name` where the module has another name for it."""

__all__ = [
    "FEWEST_SEEDS",
    "LEVEL",
    "PAPER_SEEDS",
    "Advice",
    "Comparison",
    "ComparisonResult",
    "Entry",
    "Execution",
    "LabError",
    "Metric",
    "Palette",
    "Recipe",
    "Report",
    "ResultTable",
    "Run",
    "RunStore",
    "TrainOptions",
    "Trained",
    "Verdict",
    "advise",
    "checksum",
    "describe_machine",
    "describe_metric",
    "detectable",
    "deviation",
    "effect_agreement",
    "forest",
    "grid_text",
    "judge",
    "judge_pairs",
    "list_recipes",
    "load_data",
    "load_recipe",
    "make_comparison",
    "make_report",
    "methods_as_text",
    "packed_bytes",
    "packed_text",
    "paired_differences",
    "paired_interval",
    "results_chart",
    "run_comparison",
    "run_trial",
    "sentence",
    "smallest_difference",
    "summarize",
    "t_quantile",
    "to_text",
    "trained_model",
    "words",
    "write_json",
    "write_report",
]


_RENAMED = {
    "Plan": "Comparison",
    "Record": "RunStore",
    "RunResult": "ComparisonResult",
    "TrialSpec": "Run",
    "make_plan": "make_comparison",
    "run_plan": "run_comparison",
}
"""Names of 0.2, which work until 0.4 and warn. `Comparison` was what `Verdict` is now."""


def __getattr__(name: str) -> Any:
    """Import on first use: the command reads recipes without waiting for torch."""
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(
            f"dampen.studies.{name} is now dampen.studies.{new}", DeprecationWarning, stacklevel=2
        )
        return __getattr__(new)
    for module, names in _HOMES.items():
        for public, _, there in (entry.partition("=") for entry in names.split()):
            if public == name:
                return getattr(importlib.import_module(f"dampen.studies.{module}"), there or public)
    raise AttributeError(f"module 'dampen.studies' has no attribute {name!r}")
