"""Running a plan: skip what is recorded, resume what was cut off, run the rest on an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.lab.engine import Job, Outcome, Report, make_engine
from dampen.lab.plan import Plan
from dampen.lab.record import Record
from dampen.lab.session import Execution
from dampen.lab.summary import RowSummary, read_results, summarize_plan
from dampen.lab.trial import Trial

EXIT_CODES = {"disk full": 6, "no data": 3, "interrupted": 130, "failed": 1, "locked": 4, "diverged": 5}
"""The worst outcome decides the exit code, in this order; a full disk or missing data also stops the other trials."""


@dataclass
class Run:
    """What became of a run."""

    plan: Plan
    folder: Path
    outcomes: dict[str, Outcome]
    rows: list[RowSummary]

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
            "rows": [r.to_dict() for r in self.rows],
            "messages": self.messages(),
            "exit_code": self.exit_code,
        }


def run_plan(
    plan: Plan,
    folder: Path,
    trials: list[Trial],
    execution: Execution,
    report: Report = lambda trial, event: None,
    engine: str = "local",
    retry: bool = False,
    **engine_options: Any,
) -> Run:
    """Run the trials of a plan in `folder`, one subfolder each."""
    if engine == "local":
        execution.check_here()
    plan.save(folder)
    outcomes, jobs = {}, []
    for trial in trials:
        record = Record(folder / trial.id)
        final = record.final()
        if final is not None and final["status"] == "diverged" and retry:
            record.reopen()
            final = None
        if final is None:
            jobs.append(Job(trial, record.folder))
        else:
            outcomes[trial.id] = Outcome(final["status"], final, final.get("reason", ""))
    if jobs:
        if engine == "local":
            engine_options.setdefault("planned", len(trials))
        outcomes |= make_engine(engine, **engine_options).run(jobs, execution, report)
    return Run(plan, folder, outcomes, summarize_plan(plan, read_results(plan, folder)))
