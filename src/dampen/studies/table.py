"""The one table: mean, spread, cost, comparison with the reference and with the paper, row by row.

Terminal, page, Markdown, CSV, JSON and LaTeX render this table and compute nothing of their own. It
is made from a plan and its folder (`comparison_table`), or from any runs that belong together
(`make_table`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dampen.studies.comparison import Comparison, Config, Setting
from dampen.studies.errors import DamagedRecord
from dampen.studies.metric import Metric, describe, direction
from dampen.studies.pairing import (
    AgainstPaper,
    Cost,
    FailureRate,
    Published,
    against_paper,
    averaged_folds,
    corrected_rates,
    cost_against,
    cost_of,
    effect_agreement,
    failure_rate,
    in_training,
    on_one_path,
    published_figures,
    unpaired,
    variance_ratios,
)
from dampen.studies.result import diagnosed
from dampen.studies.stats import Summary, summarize
from dampen.studies.store import LoggedRun, RunStore, read_run
from dampen.studies.verdict import Test, Verdict, contenders, judge_pairs, sentence, words

TRAINED = "better where it trained"
"""The verdict of a configuration that is significantly better, and whose runs failed more often
than the baseline's."""


@dataclass
class Entry:
    """A row as every format shows it. Values are in the unit of the table (percent
    where papers use it)."""

    name: str
    config: Config
    setting: Setting
    values: dict[str, float]  # of the table's metric, by seed
    summary: Summary
    metrics: dict[str, Summary]  # every test metric
    by_seed: dict[str, dict[str, float]]  # every test metric, by seed
    valid: float | None
    cost: Cost
    diverged: int
    unfinished: int
    problems: list[str]  # why runs have no result
    failures: FailureRate
    reference: str | None = None  # the entry it is compared with; None if it is a reference itself
    no_number: list[str] = field(
        default_factory=list
    )  # seeds that ended with NaN or infinity, or without the metric
    unpaired: list[str] = field(
        default_factory=list
    )  # seeds that ran on other kernels than the reference's
    same_as: str | None = None  # an entry before it whose runs are the same, bit by bit
    comparison: Verdict | None = None
    secondary: dict[str, Verdict] = field(
        default_factory=dict
    )  # the other metrics, each corrected over the rows
    verdict: str = "reference"
    published: dict[str, Published] = field(default_factory=dict)
    against: dict[str, AgainstPaper] = field(default_factory=dict)
    claim: str = ""

    def measured(self, metric: str) -> Summary | None:
        """Our figure beside a published one: a test metric, or what a step costs against the
        reference's."""
        if metric == "cost_ratio":
            return summarize(list(self.cost.ratios)) if self.cost.ratios else None
        return self.metrics.get(metric)

    def told(self, metric: Metric, numbers: bool = False) -> str:
        """The verdict in words; with `numbers` the difference and its interval too."""
        told = self._told(metric, numbers)
        if self.verdict == "failed":
            return told
        caution = self.comparison.caution if self.comparison else ""
        failed = self.failures.in_words() if self.verdict != TRAINED else ""
        return "; ".join(part for part in (told, failed, self.left_out, caution) if part)

    @property
    def left_out(self) -> str:
        """In words, which seeds are in no mean because they ended without a number."""
        return f"no number from seed {', '.join(self.no_number)}" if self.no_number else ""

    def _told(self, metric: Metric, numbers: bool) -> str:
        if self.same_as:
            return f"same as {self.same_as}"
        if self.verdict == "failed":
            return f"failed: {self.problems[0].partition(': ')[2]}" if self.problems else "failed"
        if self.comparison is None or self.verdict in ("no run yet", "reference", ""):
            return self.verdict
        told = sentence(self.comparison, metric) if numbers else words(self.comparison, metric)
        if self.verdict == TRAINED:
            told = told.replace("better", f"{TRAINED}, {self.failures.in_words()}", 1)
        seeds = f"{len(self.unpaired)} seed{'s' * (len(self.unpaired) != 1)}"
        return (
            f"{told}; {seeds} not paired: other kernels than the reference"
            if self.unpaired
            else told
        )

    def paired(self, values: Mapping[str, float]) -> dict[str, float]:
        """Values by seed without those that may not be paired with the reference."""
        return {seed: value for seed, value in values.items() if seed not in self.unpaired}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for programs."""
        plain: dict[str, Any] = {
            "name": self.name,
            "methods": self.config.methods,
            "grid": self.setting.grid,
        }
        plain["values"] = self.values
        plain |= {
            **asdict(self.summary),
            "planned": self.setting.planned,
            "baseline": self.config.baseline,
        }
        plain |= {"metrics": {m: asdict(s) for m, s in self.metrics.items()}, "valid": self.valid}
        plain |= {"reference": self.reference, "same_as": self.same_as, "verdict": self.verdict}
        plain |= {"unpaired": self.unpaired, "no_number": self.no_number}
        plain["failures"] = asdict(self.failures)
        plain["comparison"] = asdict(self.comparison) if self.comparison else None
        plain["secondary"] = {m: asdict(c) for m, c in self.secondary.items()}
        plain |= {
            "cost": asdict(self.cost),
            "published": {m: asdict(p) for m, p in self.published.items()},
        }
        plain |= {
            "against_paper": {m: asdict(a) for m, a in self.against.items()},
            "claim": self.claim,
        }
        return plain | {
            "diverged": self.diverged,
            "unfinished": self.unfinished,
            "problems": self.problems,
        }


@dataclass
class ResultTable:
    """All entries of a study, in the order of the plan."""

    study: LoggedComparison
    entries: list[Entry]

    def __post_init__(self) -> None:
        self._by_name = {e.name: e for e in reversed(self.entries)}

    @property
    def metric(self) -> Metric:
        """The metric that judges this table."""
        return describe(self.study.metric)

    @property
    def margin(self) -> float | None:
        """The difference that matters, in the unit of the table."""
        return next((e.comparison.margin for e in self.entries if e.comparison), self.study.margin)

    def entry(self, name: str) -> Entry:
        return self._by_name[name]

    @property
    def main_reference(self) -> Entry | None:
        """What most rows are compared with."""
        names = [e.reference for e in self.entries if e.reference]
        return self.entry(statistics.mode(names)) if names else None

    @property
    def reference_name(self) -> str:
        """What rows are compared with, in words: one row's name, or what their
        references have in common."""
        names = {e.reference for e in self.entries if e.reference}
        return (
            "the row without methods of the same model" if len(names) > 1 else next(iter(names), "")
        )

    def compared(self) -> list[Entry]:
        """The rows that are judged, each training once."""
        return [e for e in self.entries if e.comparison and not e.same_as and e.verdict != "failed"]

    def selected(self) -> list[Entry]:
        """The grid point of each row that validation chooses: every entry, unless the plan shows
        all grid points."""
        if not self.study.show_all:
            return [e for e in self.entries if e.summary.n]
        chosen = [chosen_setting(row) for row in self.study.configs]
        return [e for e in self.entries if e.summary.n and any(e.setting is c for c in chosen)]

    def ranked(self) -> list[Entry]:
        """Entries with results, best mean first."""
        done = [e for e in self.entries if e.summary.n]
        return sorted(done, key=lambda e: e.summary.mean, reverse=self.study.mode == "max")

    def contenders(self) -> list[Entry]:
        """The entries that do not differ significantly from the one with the
        best mean, that one first.

        Only the configurations of one model are compared; seeds on different kernels are no pairs.
        """
        if self.study.show_all or len({e.reference for e in self.entries if e.reference}) > 1:
            return []
        done = [e for e in self.ranked() if not e.same_as]
        if not done:
            return []
        leader = done[0].setting.logged

        def pairs(entry: Entry) -> dict[str, float]:
            own, folds = entry.setting.logged, self.study.header.get("folds") or 1
            if folds > 1:
                return entry.paired(entry.values)
            alike = {s for s, run in own.items() if s in leader and on_one_path(run, leader[s])}
            return {s: v for s, v in entry.values.items() if s in alike or s not in leader}

        test: Test = "sequential" if self.study.test == "sequential" else "fixed"
        names = contenders({e.name: pairs(e) or e.values for e in done}, self.study.mode, test)
        return [self.entry(name) for name in names]

    def kernels(self) -> dict[str, list[str]]:
        """The configurations that ran on each path of kernels, where methods of this table ran on
        more than one."""
        found: dict[str, list[str]] = {}
        for entry in (e for e in self.entries if e.config.methods):
            finals = [r.final for r in entry.setting.finished().values() if r.final]
            for path in dict.fromkeys(f.kernels for f in finals if f.kernels):
                found.setdefault(path, []).append(entry.name)
        return found if len(found) > 1 else {}

    def listed(self) -> list[Entry]:
        """Every entry: ranked, then those without a result."""
        return self.ranked() + [e for e in self.entries if not e.summary.n]

    def other_metrics(self) -> list[str]:
        """The test metrics beside the table's own, without variants such as interval_map@0.5."""
        keys = dict.fromkeys(k for e in self.entries for k in e.metrics if "@" not in k)
        return [k for k in keys if k != self.study.metric]


def comparison_table(plan: Comparison, runs: Mapping[str, LoggedRun]) -> ResultTable:
    """The table of a plan, from those of its trials that are recorded.

    Args:
        plan: the comparison.
        runs: its logged runs, by id.
    """
    return make_table(logged_comparison(plan, runs.get))


def read_runs(
    plan: Comparison, folder: Path, known: Mapping[str, LoggedRun] | None = None
) -> dict[str, LoggedRun]:
    """The plan's trials that are recorded in `folder`, by id; damaged ones are none, `known` ones
    not read again.

    Args:
        plan: the comparison.
        folder: that holds a folder for each run.
        known: runs that were read before, by id; they are not read again.
    """
    known = known or {}
    found = {}
    for i, trial in plan.runs.items():
        with suppress(DamagedRecord):  # a run names it among what failed
            found[i] = known.get(i) or read_run(folder / i, trial)
    return {i: run for i, run in found.items() if run is not None}


def read_results(plan: Comparison, folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the plan's trials that are done, by id, as they were
    written; damaged ones are none.

    Args:
        plan: the comparison.
        folder: that holds a folder for each run.
    """
    found = {}
    for i in plan.runs:
        with suppress(DamagedRecord):
            found[i] = RunStore(folder / i).final()
    return {i: r for i, r in found.items() if r is not None}


def make_table(study: LoggedComparison) -> ResultTable:
    """Summaries, comparisons and verdicts of every row (or of every grid point, where the plan
    shows them all).

    Args:
        study: a comparison with its logged runs.
    """
    entries = []
    for row in study.configs:
        settings = row.settings if study.show_all else [chosen_setting(row)]
        for setting in settings:
            name = (
                f"{row.name} · {grid_text(setting.grid)}"
                if study.show_all and setting.grid
                else row.name
            )
            entries.append(_entry(study, name, row, setting))
    table = ResultTable(study, entries)
    _set_references(table)
    _judge(table)
    _against_paper(table)
    return table


def grid_text(grid: Mapping[str, Any]) -> str:
    """A grid point in words.

    Args:
        grid: values by the dotted names of their axes.

    >>> grid_text({"lambda": 0.001, "train.lr": 0.0005})
    'lambda 0.001, lr 0.0005'
    """
    return ", ".join(
        f"{axis_name(k)} {v:g}" if isinstance(v, float) else f"{axis_name(k)} {v}"
        for k, v in grid.items()
    )


def axis_name(key: str) -> str:
    """The last part of a dotted key."""
    return key.rsplit(".", 1)[-1]


def chosen_setting(row: Config) -> Setting:
    """The grid point with the best mean on validation among those with the most
    runs; the test has no say."""
    scores = []
    for setting in row.settings:
        done = [r.final for r in setting.finished().values() if r.final]
        found = [f.validated for f in done if f.validated is not None]
        mean = statistics.fmean(found) if found else 0.0
        scores.append((len(done), mean if not done or done[0].selection[1] == "max" else -mean))
    return row.settings[max(range(len(scores)), key=lambda i: scores[i])]


def best_setting(row: Config, results: Mapping[str, dict[str, Any]]) -> Setting:
    """The same choice for a planned row, from results by trial id."""
    scores = []
    for point in row.settings:
        done = [
            results[i]
            for i in point.ids.values()
            if i in results and results[i]["status"] == "finished"
        ]
        if done:
            name, mode = done[0]["selection"]
            known = [r["valid"][name] for r in done if r["valid"].get(name) is not None]
            mean = (
                statistics.fmean(known) if known else 0.0
            )  # one's own training may have no validation
            scores.append((len(done), mean if mode == "max" else -mean))
        else:
            scores.append((0, 0.0))
    return row.settings[max(range(len(scores)), key=lambda i: scores[i])]


def _entry(study: LoggedComparison, name: str, row: Config, setting: Setting) -> Entry:
    finals = {seed: run.final for seed, run in setting.finished().items() if run.final}
    found = {
        s: {**f.test, **in_training(f), **diagnosed(setting.logged[s].measured)}
        for s, f in finals.items()
    }
    keys = list(dict.fromkeys(k for values in found.values() for k in values))
    by_seed = {
        k: {
            s: describe(k).scale * value
            for s, v in found.items()
            if (value := v.get(k)) is not None
        }
        for k in keys
    }
    if study.header.get("folds"):
        by_seed = {k: averaged_folds(v, study.header["folds"]) for k, v in by_seed.items()}
    values = by_seed.get(study.metric, {})
    validated = [f.validated for f in finals.values() if f.validated is not None]
    statuses = [run.status for run in setting.logged.values()]
    without = [
        f"seed {s}: {run.reason}"
        for s, run in setting.logged.items()
        if run.status in ("diverged", "failed")
    ]
    for seed, values_of in found.items():
        if finals[seed].task == "own" and study.metric not in values_of:
            without.append(
                f"seed {seed}: it returned no {study.metric}, only {', '.join(values_of)}"
            )
    no_number = [
        s
        for s, values_of in found.items()
        if study.metric in values_of and values_of[study.metric] is None
    ]
    without += [f"seed {s}: no number, {study.metric} is undefined or infinite" for s in no_number]
    ended = [s for s, run in setting.logged.items() if run.status != "unfinished"]
    numbers = {s for s, values_of in found.items() if values_of.get(study.metric) is not None}
    return Entry(
        name=name,
        config=row,
        setting=setting,
        values=values,
        summary=summarize(list(values.values())),
        metrics={k: summarize(list(v.values())) for k, v in by_seed.items()},
        by_seed=by_seed,
        valid=statistics.fmean(validated) if validated else None,
        cost=cost_of(list(finals.values())),
        diverged=statuses.count("diverged"),
        unfinished=setting.planned - statuses.count("finished") - statuses.count("diverged"),
        problems=without,
        failures=failure_rate(sum(s not in numbers for s in ended), len(ended)),
        no_number=no_number,
        published=published_figures(setting.published or row.published),
    )


def _variance_ratio(entry: Entry, reference: Entry) -> None:
    """The variance against the reference's, seed by seed: the form in which
    AttentionDrop states its claim."""
    found = variance_ratios(*(e.by_seed.get("training_variance", {}) for e in (entry, reference)))
    if found:
        entry.by_seed["variance_ratio"] = found
        entry.metrics["variance_ratio"] = summarize(list(found.values()))


def _set_references(table: ResultTable) -> None:
    """Each row's reference is that of its model; rows of another model are not
    compared with each other."""
    if table.study.show_all and not any(row.baseline for row in table.study.configs):
        return  # a grid has no row to test against
    for entries in _groups(table.entries):
        reference = _reference(entries)
        reference.cost = reference.cost.as_reference()
        for entry in entries:
            if entry is not reference:
                entry.reference = reference.name
                entry.cost = cost_against(
                    entry.cost, entry.setting.finished(), reference.setting.finished()
                )
                entry.unpaired = unpaired(
                    entry.setting.finished(),
                    reference.setting.finished(),
                    table.study.header.get("folds") or 1,
                )
                _variance_ratio(entry, reference)
        if not table.study.show_all:
            _find_twins([reference, *(e for e in entries if e is not reference)])


def _find_twins(entries: list[Entry]) -> None:
    """Mark rows that are the same as one before: every shared seed ended with the same weights,
    tested to the same result (Monte Carlo at test gives others)."""
    first: dict[tuple[str, str], list[tuple[Entry, dict[str, str]]]] = {}
    for entry in entries:
        finals = {s: r.final for s, r in entry.setting.finished().items() if r.final}
        if not entry.summary.n or not all(f.last_weights for f in finals.values()):
            continue
        marks = {s: f"{f.last_weights} {sorted(f.test.items())}" for s, f in finals.items()}
        alike = first.setdefault(min(marks.items()), [])
        twin = next(
            (
                e.name
                for e, other in alike
                if all(marks[s] == other[s] for s in marks.keys() & other)
            ),
            None,
        )
        entry.same_as = twin
        if twin is None:
            alike.append((entry, marks))


def _groups(entries: list[Entry]) -> list[list[Entry]]:
    """The rows that are compared with each other: those of one model by name, and where a table has
    several settings of that model (depths, say), each with a row without methods,
    those of one setting."""
    settings: dict[str, list[Entry]] = {}
    for entry in entries:
        settings.setdefault(str(sorted(_model_of(entry).items())), []).append(entry)
    whole = {key: s for key, s in settings.items() if len({bool(e.config.methods) for e in s}) == 2}
    whole = whole if len(whole) > 1 else {}
    names: dict[str, list[Entry]] = {}
    for entry in (e for key, s in settings.items() if key not in whole for e in s):
        names.setdefault(str(_model_of(entry).get("name", "")), []).append(entry)
    return [*whole.values(), *names.values()]


def _model_of(entry: Entry) -> Mapping[str, Any]:
    config = next((r.config for r in entry.setting.logged.values()), {"model": entry.setting.model})
    found: Mapping[str, Any] = config.get("model", {})
    return found


def _reference(entries: list[Entry]) -> Entry:
    """The row that says so; else the one without methods; else the first."""
    flagged = (
        [e for e in entries if e.config.baseline]
        or [e for e in entries if not e.config.methods]
        or entries
    )
    return next((e for e in flagged if e.summary.n), flagged[0])


def _judge(table: ResultTable) -> None:
    """The verdict of every row in every metric; each metric is a family of its own,
    corrected over its rows."""
    study = table.study
    test: Test = "sequential" if study.test == "sequential" else "fixed"
    for entry in table.entries:
        if not entry.summary.n:
            entry.verdict = "failed" if entry.problems else "no run yet"
        elif entry.reference is None and study.show_all:
            entry.verdict = ""
    _compare_failures(table)
    added = study.header.get("added") or {}
    later = {e.name: added[e.config.name] for e in table.entries if e.config.name in added}
    rows = [e for e in table.entries if e.reference and not e.same_as and e.verdict != "failed"]
    pairs = {e.name: (e.paired(e.values), table.entry(e.reference or "").values) for e in rows}
    for name, found in judge_pairs(
        pairs, study.metric, better=study.mode, margin=study.margin, test=test, added=later
    ).items():
        entry = table.entry(name)
        entry.comparison = found
        word = TRAINED if found.verdict == "better" and entry.failures.in_excess else found.verdict
        entry.verdict = entry.verdict if entry.verdict == "no run yet" else word
    for metric in (m for m in table.other_metrics() if describe(m).better):
        pairs = {
            e.name: (
                e.paired(e.by_seed.get(metric, {})),
                table.entry(e.reference or "").by_seed.get(metric, {}),
            )
            for e in rows
        }
        for name, found in judge_pairs(
            {n: p for n, p in pairs.items() if p[0]}, metric, test=test, added=later
        ).items():
            table.entry(name).secondary[metric] = found
    for entry in (e for e in table.entries if e.same_as):
        twin = table.entry(entry.same_as or "")
        entry.comparison, entry.secondary = twin.comparison, twin.secondary
        entry.verdict = twin.verdict if twin.comparison else "same"


def _compare_failures(table: ResultTable) -> None:
    """The failure rates of all configurations against their references', as one family."""
    rates = {}
    for entry in (e for e in table.entries if e.reference):
        own, theirs = entry.failures, table.entry(entry.reference or "").failures
        rates[entry.name] = failure_rate(own.failed, own.runs, theirs.failed, theirs.runs)
    for name, rate in corrected_rates(rates).items():
        table.entry(name).failures = rate


def _against_paper(table: ResultTable) -> None:
    """Our figures next to the published ones, and whether the paper's gain over its
    reference shows here too."""
    for entry in table.entries:
        for metric, paper in entry.published.items():
            entry.against[metric] = against_paper(
                entry.measured(metric), paper, table.study.departures
            )
        entry.claim = _claim(entry, table)


def _claim(entry: Entry, table: ResultTable) -> str:
    """The paper's difference to its reference row, and ours: absolute figures may differ where
    gains agree."""
    metric, ours = table.study.metric, entry.comparison
    reference = table.entry(entry.reference) if entry.reference else None
    if reference is None or metric not in entry.published or metric not in reference.published:
        return ""
    gain = entry.published[metric].mean - reference.published[metric].mean
    if ours is None or ours.p is None or entry.verdict == "failed":
        return (
            f"paper {gain:+.2f}, here {'failed' if entry.verdict == 'failed' else 'too few runs'}"
        )
    shown = f"paper {gain:+.2f}, here {ours.difference:+.2f}"
    if entry.verdict not in ("better", "worse"):
        return f"{shown}: {'equal here' if entry.verdict == 'equal' else 'inconclusive here'}"
    return f"{shown}: {effect_agreement(ours.low, ours.high, gain)}"


@dataclass
class LoggedComparison:
    """What a table is made of: configurations with their logged runs, under one protocol."""

    name: str
    title: str
    metric: str
    mode: str
    configs: list[Config]
    header: dict[str, Any] = field(default_factory=dict)
    departures: list[str] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)
    show_all: bool = False  # every grid point is a row of its own
    search: dict[str, Any] = field(default_factory=dict)  # what a search tried, where there was one

    @property
    def margin(self) -> float | None:
        """The margin that the user said, in the unit of the table; None for the metric's own."""
        return self.header.get("margin")

    @property
    def test(self) -> str:
        """'fixed', or 'sequential' for a plan that was looked at while it grew."""
        out: str = self.header.get("test", "fixed")
        return out

    def runs(self) -> list[LoggedRun]:
        """Every run of the study."""
        return [
            run
            for config in self.configs
            for setting in config.settings
            for run in setting.logged.values()
        ]

    def grid_keys(self) -> list[str]:
        """The names of the grid's axes, in the order of the plan."""
        return list(
            dict.fromkeys(
                key
                for config in self.configs
                for setting in config.settings
                for key in setting.grid
            )
        )

    def planned(self) -> int:
        return sum(setting.planned for config in self.configs for setting in config.settings)

    def judge_by(self, wanted: str | None) -> None:
        """Set the metric of the table and its direction, from the request and the logged runs."""
        finals = [r.final for r in self.runs() if r.final and r.status == "finished"]
        self.metric = wanted or (finals[0].primary[0] if finals else "accuracy")
        known = {name: mode for final in finals for name, mode in (final.selection, final.primary)}
        said = self.header.get("mode") if wanted else None
        self.mode = said or direction(self.metric, known.get(self.metric))


def logged_comparison(
    plan: Comparison, find: Callable[[str], LoggedRun | None]
) -> LoggedComparison:
    """A comparison with the runs that are logged.

    Args:
        plan: the comparison.
        find: a logged run by its id, or None where there is none yet.
    """

    def with_runs(setting: Setting) -> Setting:
        logged = {seed: run for seed, id in setting.ids.items() if (run := find(id))}
        first = plan.runs.get(next(iter(setting.ids.values()), ""))
        return replace(setting, logged=logged, model=first.model if first is not None else {})

    study = LoggedComparison(
        name=plan.name,
        title=plan.header.get("title") or plan.name,
        metric="",
        mode="max",
        configs=[
            replace(config, settings=[*map(with_runs, config.settings)]) for config in plan.configs
        ],
        header={**plan.header, "scale": plan.scale},
        departures=plan.departures,
        show_all=plan.header.get("report") == "all",
        search=dict(plan.header.get("search") or {}),
    )
    study.judge_by(plan.header.get("metric"))
    return study
