"""Running a plan: skip finished runs, resume interrupted ones, run the rest on an engine."""

from __future__ import annotations

import inspect
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.extensions import is_in_file
from dampen.native import library
from dampen.studies.comparison import Comparison
from dampen.studies.engines import Job, Outcome, Report, make_engine
from dampen.studies.errors import DamagedRecord, DiskFull, LabError, Locked
from dampen.studies.files import finite
from dampen.studies.methods_text import OBJECT
from dampen.studies.result import Event
from dampen.studies.run import Run
from dampen.studies.store import RunStore, locked
from dampen.studies.table import ResultTable, comparison_table, read_runs
from dampen.studies.trainer.checkpoint import kernels_before
from dampen.studies.trainer.data import check_recorded
from dampen.studies.trainer.state import Execution
from dampen.studies.trust import approve, code_of_plan

EXIT_CODES = {
    "disk full": 6,
    "no data": 3,
    "refused": 2,
    "interrupted": 130,
    "failed": 1,
    "locked": 4,
    "diverged": 5,
}
"""The worst outcome decides the exit code, in this order; a full disk, missing data or a function
that does not fit also stops the other trials."""


@dataclass
class ComparisonResult:
    """What became of a run."""

    plan: Comparison
    folder: Path
    outcomes: dict[str, Outcome]
    table: ResultTable

    @property
    def exit_code(self) -> int:
        statuses = {o.status for o in self.outcomes.values()}
        return next((code for status, code in EXIT_CODES.items() if status in statuses), 0)

    def counts(self) -> dict[str, int]:
        """How many trials ended how."""
        return dict(Counter(o.status for o in self.outcomes.values()))

    def messages(self) -> list[str]:
        """What went wrong, each message once."""
        bad = (
            o.message
            for o in self.outcomes.values()
            if o.status not in ("finished", "interrupted") and o.message
        )
        return list(dict.fromkeys(bad))

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.plan.name,
            "scale": self.plan.scale,
            "folder": str(self.folder),
            "metric": self.plan.header["metric"],
            "trials": self.counts(),
            "test": self.table.study.test,
            "margin": self.table.margin,
            "race": self.plan.header.get("race"),
            "rows": [finite(entry.to_dict()) for entry in self.table.entries],
            "messages": self.messages(),
            "exit_code": self.exit_code,
        }


def run_comparison(
    plan: Comparison,
    folder: Path,
    trials: list[Run],
    execution: Execution,
    report: Report = lambda trial, event: None,
    engine: str = "local",
    retry: bool = False,
    **engine_options: Any,
) -> ComparisonResult:
    """Run the trials of a plan in `folder`, one subfolder each.

    Args:
        plan: the comparison.
        folder: where each run has its own folder.
        trials: the runs to do, of those of the comparison.
        execution: threads, devices, data, plug-ins.
        report: receives each event with the id of its run.
        engine: 'local', 'ray', or the name of a plug-in's.
        retry: run diverged runs again.
        engine_options: arguments of the engine, such as `workers`.
    """
    if engine == "local":
        execution.check_here()
    outcomes: dict[str, Outcome] = {}
    jobs, recorded = [], []
    for trial in trials:
        record = RunStore(folder / trial.id)
        try:
            final = record.final()
        except DamagedRecord as error:  # one damaged result must not keep the others from running
            outcomes[trial.id] = Outcome("failed", None, str(error))
            continue
        if final is not None and final["status"] == "diverged" and retry:
            record.reopen()
            final = None
        if final is None:
            jobs.append(Job(trial, record.folder))
        else:
            outcomes[trial.id] = Outcome(final["status"], final, final.get("reason", ""))
            recorded.append((trial, final))
    jobs, twins = trained_once(jobs, plan.runs.values(), folder, retry)
    recorded += [
        (trial, final) for trial, final in finals_of(twins, folder) if trial.id not in outcomes
    ]
    check_recorded(recorded, execution.data_dir, folder)
    approve(code_of_plan(plan, folder, imported=True))  # the user runs it
    plan.save(folder)
    if jobs:
        if engine == "local":
            engine_options.setdefault("planned", len(trials) - len(twins))
        outcomes |= make_engine(engine, **engine_options).run(jobs, execution, report)
    for job, first in twins:
        outcomes[job.trial.id] = outcome = take_over(job, first, outcomes)
        report(job.trial.id, Event(kind="outcome", status=outcome.status, message=outcome.message))
    runs = read_runs(plan, folder)
    table = comparison_table(plan, runs)
    if not plan.header["metric"] and runs:
        plan.header["metric"] = table.study.metric
        plan.save(folder)
    return ComparisonResult(plan, folder, outcomes, table)


# --------------------
# Trials that are the same training under two names are trained once; the other takes over the
# result.
# J_q and J_k of Explicit Dropout are one function (the paper's tables have a row for each), and
# `drop_key` is `drop_key(rate=0.1)`. `Regularizer.canonical` says which arguments agree. Both
# trials get a whole record of their own, so that tables, pages and older readers see nothing
# unusual; the second one's result says whose training it was.


def training_of(trial: Run) -> str:
    """What is trained, as text: equal for trials that compute the same.

    A pretraining has a folder of its own and a user's function sees the name of its row, so such
    trials agree with none but themselves.

    Args:
        trial: a run.

    >>> parts = {"data": {"name": "digits"}, "model": {"name": "vit"}}
    >>> make = lambda **terms: Run.from_dict({**parts, "methods": [{"name": "explicit_dropout", **terms}]})
    >>> training_of(make(query=0.1)) == training_of(make(key=0.1)), make(query=0.1).id == make(key=0.1).id
    (True, False)
    >>> training_of(make(query=0.1, form="exact")) == training_of(make(key=0.1, form="exact"))
    False
    """
    if trial.function is not None or trial.pretrain is not None:
        return trial.id
    plain = trial.canonical()
    plain["methods"] = [_method(m) for m in plain["methods"]]
    return json.dumps(plain, sort_keys=True)


def _method(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A method in its one spelling: no argument that says the default."""
    from dampen.registry import find_method

    if is_in_file(spec["name"]) or OBJECT in spec:
        return dict(spec)
    cls = find_method(spec["name"])
    defaults = {k: p.default for k, p in inspect.signature(cls).parameters.items()}
    given = cls.canonical({k: v for k, v in spec.items() if k != "name"})
    return {"name": spec["name"]} | {
        k: v for k, v in given.items() if k not in defaults or v != defaults[k]
    }


def trained_once(
    jobs: Sequence[Job], planned: Collection[Run], folder: Path, retry: bool = False
) -> tuple[list[Job], list[tuple[Job, Run]]]:
    """The jobs to train, and those that take over the result of another trial of the plan, each
    with that trial.

    What is recorded, or has begun, goes before what is not. Nothing is taken over from other
    kernels than those in use, which draw from another stream; nor, with `retry`, what diverged.
    """
    asked = {job.trial.id for job in jobs}
    trainings = {run.id: training_of(run) for run in planned}
    groups: dict[str, list[Run]] = {}
    for run in planned:
        groups.setdefault(trainings[run.id], []).append(run)
    own, twins = [], []
    for job in jobs:
        group = groups.get(trainings.get(job.trial.id, ""), [])
        alike = [
            t
            for t in group
            if _usable(folder / t.id, retry) or (t.id in asked and _on_this_path(folder / t.id))
        ]
        first = min(
            alike,
            default=job.trial,
            key=lambda t: (not _done(folder / t.id), not (folder / t.id).exists()),
        )
        if first.id == job.trial.id or not _on_this_path(job.folder):
            own.append(job)
        else:
            twins.append((job, first))
    return own, twins


def take_over(job: Job, first: Run, outcomes: Mapping[str, Outcome]) -> Outcome:
    """Write the record of a trial from that of the one that was trained; what became
    of it where that has none.

    What cannot be read or written is an outcome like any other: the other
    trials still have their table.

    Args:
        job: the run that is not trained.
        first: the run with the same training.
        outcomes: how runs ended, by id.
    """
    try:
        return _take_over(job, first, outcomes)
    except Locked as error:
        return Outcome("locked", None, str(error))
    except DiskFull as error:
        return Outcome("disk full", None, str(error))
    except LabError as error:
        return Outcome("failed", None, str(error))


def _take_over(job: Job, first: Run, outcomes: Mapping[str, Outcome]) -> Outcome:
    source = RunStore(job.folder.parent / first.id)
    final = source.final()
    if final is None:
        return outcomes.get(first.id, Outcome("interrupted", None, "not started"))
    with locked(job.folder):
        record = RunStore(job.folder)
        record.start(
            job.trial, (source.sessions() or [{}])[-1]
        )  # results do not need environment.json
        record.write_lines(source.lines())
        for weights in source.folder.glob("*.safetensors"):
            shutil.copyfile(weights, job.folder / weights.name)
        result = {**final, "id": job.trial.id, "same_as": first.id}
        record.finish(result)
    return Outcome(final["status"], result, final.get("reason", ""))


def finals_of(twins: Iterable[tuple[Job, Run]], folder: Path) -> list[tuple[Run, dict[str, Any]]]:
    """The results that are there already among those that twins will take over, each once."""
    sources = {first.id: first for _, first in twins}
    found = [(first, _final(folder / first.id)) for first in sources.values()]
    return [(first, final) for first, final in found if final is not None]


def _usable(folder: Path, retry: bool) -> bool:
    """Whether a recorded result may be taken over."""
    final = _final(folder)
    if final is None or (retry and final["status"] == "diverged"):
        return False
    return final.get("kernels", "") in ("", library.path())


def _on_this_path(folder: Path) -> bool:
    """Whether a trial that is to be trained will run on the kernels in use: one that
    resumes keeps to its own."""
    return kernels_before(folder) in ("", library.path())


def _done(folder: Path) -> bool:
    return _final(folder) is not None


def _final(folder: Path) -> dict[str, Any] | None:
    try:
        return RunStore(folder).final()
    except DamagedRecord:  # the run says so where it meets it
        return None
