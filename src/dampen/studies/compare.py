"""`dampen.compare`: which method is worth it in your own training, in one call."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dampen.handle import regularize
from dampen.studies.checks import brings_task
from dampen.studies.comparison import Comparison
from dampen.studies.configs import PLAIN
from dampen.studies.engines import Report
from dampen.studies.engines.runner import ComparisonResult, run_comparison
from dampen.studies.errors import ConfigError, Interrupted, LabError, Refused
from dampen.studies.methods_text import build_methods
from dampen.studies.report.terminal import Pace
from dampen.studies.request import ComparisonRequest, planned, request_own
from dampen.studies.result import Event
from dampen.studies.run import Run
from dampen.studies.sequential import race_plan, seconds
from dampen.studies.store import RunStore
from dampen.studies.study import Study, save_function, save_parts, table_html
from dampen.studies.trainer.data import load_data, places, seed_all
from dampen.studies.trainer.models import make_model
from dampen.studies.trainer.optim import loss_of
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from dampen.studies.trainer.user_function import Parts, as_function, being_read, function_in_file
from dampen.studies.tuning import chosen_in_words, own_metric, tune, tuned_recipe

if TYPE_CHECKING:
    from dampen.studies.study import Study


def compare(
    train: Callable[[Any], Mapping[str, Any]] | str | None = None,
    *,
    model: Any = None,
    data: Any = None,
    methods: Any,
    seeds: int | Sequence[int] = 8,
    reference: str = PLAIN,
    metric: str | Sequence[str] | None = None,
    margin: float | None = None,
    params: Mapping[str, Any] | None = None,
    tune: int = 0,
    until_decided: bool = False,
    budget: str | float | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    folder: Path | str | None = None,
    resume: bool = True,
    progress: bool = True,
    same_code: bool = False,
    loggers: Sequence[str] = (),
) -> Study:
    """Compare methods in your training function, or in the built-in trainer
    with your model and data.

    Args:
        train: a function of a `dampen.Trial` that trains and returns test metrics, or
            `"train.py:train"`.
        model: for the built-in trainer instead: a name, a path, or a function.
        data: likewise.
        methods: the rows: text, a regularizer, a list of them, or names for these; see
            `dampen.studies.configs`.
        seeds: how many, or which. The same seed gives every row the same initial
            weights and order of batches.
        reference: the row that the others are compared with; `"plain"` is
            added where it is not there.
        metric: the test metric to judge by, as in `"f1"` or `"rmse:min"`; default:
            the first that comes back.
        margin: the smallest difference that matters, in the unit of the table.
        params: what the function reads from `trial.params`.
        tune: how many settings of every row, the baseline too, are tried on three tuning seeds
            first: learning rate, weight decay and the methods' strengths, chosen
                by the mean of validation.
        until_decided: add seeds until every row is decided; `budget` (such
            as "30m") ends it earlier.
        engine: where trials run, "local" or "ray"; see `dampen compare --help`.
        address: of a Ray cluster.
        workers: trials at a time.
        threads: of each trial.
        folder: where records go; default: a folder below `runs` that follows from
            function and parameters.
        resume: keep the logged runs and resume the interrupted ones.
        progress: show it.
        same_code: count records of an older version of the code.
        loggers: "tensorboard", "wandb", or what other packages bring, written beside the record.

    Returns:
        the finished study.

    Raises:
        ConfigError: a request that cannot run; every problem is named at once.
        LabError: no run came to an end.
    """
    if being_read() is not None:
        raise LabError(
            f"dampen.compare was called while {being_read()} was being "
            "imported for its training function. Put the "
            'call under `if __name__ == "__main__":`.'
        )
    if (train is None) == (model is None and data is None):
        raise ConfigError(
            "The comparison", ["say either train=, your own function, or data= (and model=)"]
        )
    if train is None:
        from dampen.studies.request import request_parts

        asked = request_parts(
            model,
            data,
            methods,
            seeds,
            reference=reference,
            metric=metric,
            params=params,
            folder=folder,
            resume=resume,
        )
    else:
        function = function_in_file(train) if isinstance(train, str) else as_function(train)
        asked = request_own(
            function,
            methods,
            seeds,
            reference=reference,
            metric=metric,
            params=params,
            folder=folder,
            resume=resume,
            same_code=same_code,
        )
    if asked.remark and progress:
        print(asked.remark, file=sys.stderr)
    settings: dict[str, Any] = {
        "engine": engine,
        "address": address,
        "workers": workers,
        "threads": threads,
    }
    settings |= {"progress": progress, "loggers": tuple(loggers)}
    study = Study(asked.folder, asked.plan, asked.function, asked.parts, settings)
    _start(study, asked, tune, until_decided, budget, margin)
    return study


def _start(
    study: Study,
    asked: ComparisonRequest,
    tune: int,
    until_decided: bool,
    budget: str | float | None,
    margin: float | None,
) -> None:
    until_decided = until_decided or budget is not None  # a budget is for as many seeds as it takes
    if tune:
        _tune(study, asked, tune)
    if margin is not None:
        study.plan.header["margin"] = margin
    check_rows(study.plan, study.folder, Execution(function=study.function, parts=study.parts))
    if not until_decided:
        run(study, {}, **study.settings)
        return

    def train(trials: list[Run]) -> bool:
        return run(study, {}, trials, **study.settings).exit_code != 130

    study.race = race_plan(
        study.plan, study.folder, train, margin=margin, budget=seconds(budget) if budget else None
    )
    if study.settings["progress"]:
        print(study.race.told(), file=sys.stderr)


def _tune(study: Study, asked: ComparisonRequest, trials: int) -> None:
    """Choose learning rate, weight decay and strengths of every row on validation first, the
    baseline's too; the study continues with the best."""
    if study.function is not None:
        own_metric(study.function)
    study.folder = study.folder.with_name(f"{study.folder.name}-tuned")
    recipe = tuned_recipe(asked.recipe, trials, asked.settings)

    def train(tuning: Comparison, place: Path) -> int:
        function = study.function and replace(study.function, must_validate=True)
        own = Study(place, tuning, function, study.parts, study.settings)
        return run(own, {}, **study.settings).exit_code

    first = planned(recipe)
    first.header |= asked.plan.header
    study.plan, code = tune(recipe, first, study.folder, None, (), (), train)
    if code:
        raise LabError(
            f"The tuning in {study.folder} stopped (code {code}). Repeat the call to resume."
        )
    if study.settings["progress"]:
        print("\n".join(chosen_in_words(study.folder)), file=sys.stderr)


def run(
    study: Study,
    objects: Mapping[str, bytes],
    chosen: list[Run] | None = None,
    *,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    loggers: tuple[str, ...] = (),
    data_dir: str | None = None,
) -> ComparisonResult:
    """Run what is missing of a study's plan; raise where nothing came out of it."""
    plan, folder = study.plan, study.folder
    if study.function is not None:
        names = plan.config_of_run()
        study.function = replace(
            study.function, rows=names, objects={**study.function.objects, **objects}
        )
        save_function(study.function, folder)
    else:
        save_parts(study.parts or Parts(), folder, data_dir)
    own: dict[str, Any] = {"function": study.function, "parts": study.parts, "data_dir": data_dir}
    execution = Execution(threads=threads, keep_weights=False, loggers=loggers, **own)
    options: dict[str, Any] = {"engine": engine, "workers": workers}
    options |= {"address": address} if engine == "ray" else {}
    trials = plan.chosen() if chosen is None else chosen
    with view_of(study, trials, progress) as view:
        result = run_comparison(plan, folder, trials, execution, view, retry=False, **options)
    if result.exit_code == 130:
        raise Interrupted(f"Stopped. Finished runs are in {folder}. Repeat the call to resume.")
    messages = "\n".join(result.messages()) or "no trial finished"
    if any(o.status == "refused" for o in result.outcomes.values()):
        raise Refused(messages)
    if not any(o.status == "finished" for o in result.outcomes.values()):
        raise LabError(f"No trial of {folder} came to an end:\n{messages}")
    return result


# --------------------
# Progress of a study: in a terminal as `dampen compare` shows it, in a notebook as a table that
# fills up.


@contextmanager
def view_of(study: Study, trials: list[Run], progress: bool) -> Iterator[Report]:
    """Something that takes the events of a run and shows them, or does not."""
    if not progress:
        yield lambda trial, event: None
        return
    done = sum(RunStore(study.folder / t.id).done for t in trials)
    if in_notebook():
        yield NotebookView(study, study.plan.labels(trials), done)
        return
    from dampen.studies.report.terminal import LiveView, console_for

    with LiveView(console_for(stderr=True), study.plan.labels(trials), done) as view:
        yield view


def in_notebook() -> bool:
    """Whether this is Jupyter's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell: Any = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


EVERY = 1.0
"""Seconds between two looks of a notebook at the running trials."""


class NotebookView:
    """One output that is replaced while trials run: how many are done, what the others are at, the
    time left, and the table so far."""

    def __init__(self, study: Study, labels: dict[str, str], done: int):
        from IPython.display import HTML, display

        self.study, self.pace, self.html = study, Pace(labels, done), cast(Any, HTML)
        self.table = table_html(study) if done else ""
        self.shown_at = time.monotonic()
        self.output = display(HTML(self._content()), display_id=True)

    def __call__(self, trial: str, event: Event) -> None:
        self.pace.take(trial, event)
        now = time.monotonic()
        if event.kind == "outcome":
            self.table = table_html(self.study)
        if event.kind == "outcome" or now - self.shown_at >= EVERY:
            self.shown_at = now
            self.output.update(self.html(self._content()))

    def _content(self) -> str:
        return f"<p>{escape(self.pace.line())}</p>{self.table}"


# --------------------
# Looking before leaping: can every row run on this model, and how long will it take?


STEPS = 6
"""Steps that a dry run takes of each row."""


def check_rows(plan: Comparison, folder: Path, execution: Execution) -> None:
    """Refuse rows that cannot run on the model, all at once and before anything starts: one step
    with two examples.

    Rows that have a result already are not tried again; a training of the user's own, and
    pretraining, are not ours to cut short.

    Args:
        plan: the comparison.
        folder: of its runs; configurations with a result are not checked again.
        execution: with the user's model and data, where there are any.
    """
    problems, state = [], torch.get_rng_state()
    for row in plan.configs:
        trial = plan.first_run(row)
        done = any(
            (folder / i / "final.json").exists() for p in row.settings for i in p.ids.values()
        )
        if (
            trial.function is None
            and trial.pretrain is None
            and brings_task(trial.model["name"]) is None
            and not done
        ):
            problem = _problem(trial, execution)
            problems += (
                [f"row {row.name!r} cannot run on {trial.model['name']}: {problem}"]
                if problem
                else []
            )
    torch.set_rng_state(state)
    if problems:
        raise ConfigError("The comparison", problems)


def _problem(trial: Run, execution: Execution) -> str:
    """Why the methods of a trial do not work on its model, or nothing. What is wrong
    without them is raised."""
    data = load_data(trial.data, execution.data_dir, execution.parts, trial.seed)
    trial.train.steps_per_epoch(
        len(data.train)
    )  # raises where there are fewer examples than one batch has
    seed_all(0)
    try:
        model = make_model(trial.model, data.model_args, execution.parts).train()
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "The model", [f"{trial.model['name']} cannot be built for this data: {error}"]
        ) from error
    batch = data.train.batch([0, min(1, len(data.train) - 1)])

    def criterion(output: Any) -> torch.Tensor:
        return loss_of(data, output, batch["target"], batch.get("valid"))

    if not trial.methods:
        try:
            criterion(model(*batch["inputs"]))
        except (ValueError, TypeError, RuntimeError, AssertionError) as error:
            shapes = [tuple(x.shape) for x in batch["inputs"]]
            problem = (
                f"{trial.model['name']} cannot take the data, inputs of shape {shapes}: {error}"
            )
            raise ConfigError("The model", [problem]) from error
        return ""
    try:
        handle = regularize(model, build_methods(trial.methods), **places(trial.sites))
        handle.loss(lambda: model(*batch["inputs"]), criterion, valid=batch.get("valid"))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class RowProbe:
    """What a few steps of a row said: whether it runs, what a step takes, and
    how long a trial will."""

    row: str
    problem: str = ""
    step_seconds: float | None = None
    steps: int | None = None

    @property
    def seconds(self) -> float | None:
        """The steps of one trial, without evaluation; None where the training does
        not say how long it is."""
        return (
            self.step_seconds * self.steps if self.step_seconds is not None and self.steps else None
        )


def probe(plan: Comparison, execution: Execution) -> list[RowProbe]:
    """Run a few steps of the first trial of each row, in a folder that is thrown away.

    Args:
        plan: the comparison.
        execution: how runs are executed.
    """
    return [_probe(row.name, plan.first_run(row), execution) for row in plan.configs]


def _probe(row: str, trial: Run, execution: Execution) -> RowProbe:
    seen: list[tuple[float, int, int | None]] = []

    def report(event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            count, total = event.get("count", event["step"]), event["steps"]
            if (
                "fraction" in event
            ):  # a user's function reports the share that is done before a step
                total = (
                    round((count - 1) / event["fraction"])
                    if event["fraction"] and count > 1
                    else None
                )
            if not seen or count > seen[-1][1]:
                seen.append((time.perf_counter(), count, total))

    quick = replace(execution, progress_seconds=0.0, keep_weights=False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_trial(trial, Path(folder) / trial.id, quick, report, lambda: len(seen) >= STEPS)
        except Interrupted:
            pass  # as requested
        except LabError as error:
            return RowProbe(row, str(error))
        except (
            Exception
        ) as error:  # data and models raise their own kinds; a dry run reports all of them
            return RowProbe(row, f"{type(error).__name__}: {error}")
    gaps = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(seen) if b[1] > a[1]]
    total = next((t for _, _, t in reversed(seen) if t), None)
    return RowProbe(row, "", statistics.median(gaps) if gaps else None, total)
