"""From records to the rows of a table: mean, spread, cost and verdict of each row of a plan."""

from __future__ import annotations

import statistics
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dampen.lab.allocator import AS_FOUND
from dampen.lab.plan import Plan, Point, Row
from dampen.lab.record import Record
from dampen.lab.stats import Summary, compare_all, summarize, verdict

PERCENT = frozenset({"accuracy", "ece", "frame_map", "pgd_accuracy"})
"""Metrics that are fractions here and percent in papers and tables."""


@dataclass
class RowSummary:
    """One row as a table shows it. Values are in the unit of the table (percent where papers use it)."""

    name: str
    grid: dict[str, Any]
    values: dict[str, float]  # the test metric by seed
    summary: Summary
    valid: float | None
    cost: float | None  # time of a step against the baseline's, the median over shared seeds
    verdict: str
    published: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    planned: int = 0
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sd": None, **{k: _number(v) for k, v in asdict(self.summary).items()}, "summary": None}


def unit(metric: str) -> float:
    """What a value is multiplied with to be shown."""
    return 100.0 if metric in PERCENT else 1.0


def read_results(plan: Plan, folder: Path, known: Container[str] = ()) -> dict[str, dict[str, Any]]:
    """The results of the plan's trials that are done, by id, but for those `known` already."""
    found = {i: Record(folder / i).final() for i in plan.trials if i not in known}
    return {i: r for i, r in found.items() if r is not None}


def summarize_plan(plan: Plan, results: dict[str, dict[str, Any]]) -> list[RowSummary]:
    """Every row (or every grid point, where the recipe reports all), against the baseline row if there is one."""
    metric = plan.header["metric"]
    entries: list[tuple[Row, Point]] = []
    for row in plan.rows:
        entries += (
            [(row, p) for p in row.points] if plan.header["report"] == "all" else [(row, best_point(row, results))]
        )
    baseline = next((p for r, p in entries if r.baseline), None)
    rows = [_summary(row, point, results, metric, baseline) for row, point in entries]
    reference = next((r.name for r in rows if r.baseline), None)
    if reference is not None and plan.header["report"] != "all":
        mode = next((r["primary"][1] for r in results.values() if r["primary"][0] == metric), "max")
        compared = compare_all({r.name: r.values for r in rows}, reference)
        for row_summary in rows:
            if row_summary.name != reference and row_summary.summary.n:
                found = compared[row_summary.name]
                row_summary.verdict = verdict(found, found.corrected, mode)
    return rows


def best_point(row: Row, results: dict[str, dict[str, Any]]) -> Point:
    """The grid point with the best mean on validation; the test has no say."""

    def score(point: Point) -> tuple[int, float]:
        done = [results[i] for i in point.trials.values() if i in results and results[i]["status"] == "finished"]
        if not done:
            return 0, 0.0
        name, mode = done[0]["selection"]
        mean = statistics.fmean(r["valid"][name] for r in done)
        return len(done), mean if mode == "max" else -mean

    most = max(score(p)[0] for p in row.points)
    return max((p for p in row.points if score(p)[0] == most), key=lambda p: score(p)[1])


def _summary(row: Row, point: Point, results: dict[str, Any], metric: str, baseline: Point | None) -> RowSummary:
    done = {s: results[i] for s, i in point.trials.items() if i in results}
    finished = {s: r for s, r in done.items() if r["status"] == "finished"}
    values = {s: unit(metric) * r["test"][metric] for s, r in finished.items() if r["test"].get(metric) is not None}
    valid = [r["valid"][r["selection"][0]] for r in finished.values()]
    problems = [f"seed {s}: {r['reason']}" for s, r in done.items() if r["status"] == "diverged"]
    return RowSummary(
        name=row.name,
        grid=point.grid,
        values=values,
        summary=summarize(list(values.values())),
        valid=statistics.fmean(valid) if valid else None,
        cost=_cost(point, baseline, results),
        verdict="baseline" if row.baseline else "diverged" if problems and not values else "",
        published=point.published or row.published,
        baseline=row.baseline,
        planned=len(point.trials),
        problems=problems,
    )


def _cost(point: Point, baseline: Point | None, results: dict[str, Any]) -> float | None:
    """The ratio of step times, seed by seed, with as many threads and the same malloc: processor time on the CPU, where
    other programs do not count."""
    if baseline is None:
        return None
    ratios = []
    for seed, trial in point.trials.items():
        ours, plain = results.get(trial), results.get(baseline.trials.get(seed, ""))
        if ours and plain and _place(ours) == _place(plain):
            kind = "step_cpu_seconds" if ours["device"] == "cpu" else "step_seconds"
            if ours[kind] and plain[kind]:
                ratios.append(ours[kind] / plain[kind])
    return statistics.median(ratios) if ratios else None


def _place(result: dict[str, Any]) -> tuple[Any, ...]:
    """What two step times must share to be compared; results from before malloc was recorded have it as found."""
    return result.get("device"), result.get("threads"), result.get("malloc", AS_FOUND)


def _number(value: float) -> float | None:
    """NaN is null in JSON."""
    return None if isinstance(value, float) and value != value else value
