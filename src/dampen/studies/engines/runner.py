"""Running a plan: skip what is recorded, resume what was cut off, run the rest on an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison
from dampen.studies.config.trial import Run
from dampen.studies.engines.engine import Job, Outcome, Report, make_engine
from dampen.studies.engines.twins import finals_of, take_over, trained_once
from dampen.studies.errors import DamagedRecord
from dampen.studies.records.events import Event
from dampen.studies.records.plain import finite
from dampen.studies.records.record import RunStore
from dampen.studies.records.table import ResultTable, comparison_table, read_runs
from dampen.studies.trainer.data_identity import check_recorded
from dampen.studies.trainer.state import Execution

EXIT_CODES = {"disk full": 6, "no data": 3, "interrupted": 130, "failed": 1, "locked": 4, "diverged": 5}
"""The worst outcome decides the exit code, in this order; a full disk or missing data also stops the other trials."""


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
        bad = (o.message for o in self.outcomes.values() if o.status not in ("finished", "interrupted") and o.message)
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
    """Run the trials of a plan in `folder`, one subfolder each."""
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
    jobs, twins = trained_once(jobs, plan.trials.values(), folder, retry)
    recorded += [(trial, final) for trial, final in finals_of(twins, folder) if trial.id not in outcomes]
    check_recorded(recorded, execution.data_dir, folder)
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
