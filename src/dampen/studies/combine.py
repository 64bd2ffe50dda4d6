"""An answer over several data sets: `dampen.combine([study, ...])`.

Every data set has the same weight, whatever its number of seeds. The mean difference has two
intervals: one for these data sets (seeds vary), and one for further data sets like them (data sets
vary), which needs at least three. The probability of improvement is that a run of the method beats
a run of the baseline on the same data set (Agarwal et al. 2021, arXiv 2108.13264), with an interval
by a bootstrap of the seeds within each data set.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dampen.studies.errors import ConfigError
from dampen.studies.metric import Metric, describe
from dampen.studies.report import write_report
from dampen.studies.report.charts import VERDICTS
from dampen.studies.report.figures import ROW, Column, Figure, Panel, finish, known, tip
from dampen.studies.stats import (
    FEWEST,
    LEVEL,
    deviation,
    holm,
    holm_levels,
    paired_differences,
    t_interval,
    t_quantile,
)
from dampen.studies.study import Study, load

DRAWS = 2000
"""Samples of the bootstrap."""


@dataclass(frozen=True)
class Across:
    """One configuration against the baseline, over all data sets that have both."""

    name: str
    difference: float  # the mean over data sets, in the unit of tables
    low: float  # for these data sets, at `level`
    high: float
    level: float
    p: float
    corrected: float  # after Holm's correction over the configurations
    new_low: float  # for further data sets, at 95 %; NaN with fewer than three
    new_high: float
    improvement: float  # the probability that a run is better than one of the baseline
    improvement_low: float
    improvement_high: float
    verdict: str  # 'better', 'worse' or 'inconclusive', for these data sets
    differences: dict[str, float]  # by data set


@dataclass
class Combined:
    """Several studies as one answer. Print it for the table."""

    studies: list[Study]
    metric: Metric
    configs: list[Across]
    left_out: list[str]  # configurations that fewer than two studies have

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for programs."""
        names = [study.plan.name for study in self.studies]
        rows = [asdict(config) for config in self.configs]
        return {
            "metric": self.metric.name,
            "studies": names,
            "configs": rows,
            "left_out": self.left_out,
        }

    def table(self) -> str:
        """The table as Markdown, best first."""
        digits, unit = self.metric.digits, self.metric.points
        lines = [
            f"| method | difference in {self.metric.title}, "
            f"{len(self.studies)} data sets | further data sets "
            "| better than a run of the baseline | verdict |",
            "|---|---|---|---|---|",
        ]
        for c in self.configs:
            further = "at least 3 data sets needed"
            if not math.isnan(c.new_low):
                further = f"{c.new_low:+.{digits}f} to {c.new_high:+.{digits}f}"
            chance, low, high = (
                f"{100 * v:.0f}" for v in (c.improvement, c.improvement_low, c.improvement_high)
            )
            found = (
                f"{c.difference:+.{digits}f}{unit} ({c.low:+.{digits}f} to {c.high:+.{digits}f})"
            )
            lines.append(
                f"| {c.name} | {found} | {further} | {chance} % ({low} to {high}) | {c.verdict} |"
            )
        return "\n".join(lines)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write all studies to one page, in HTML with the answer over all of them.

        Args:
            path: its ending says the format: html, md, csv, json or tex.
        """
        title = f"{self.metric.label.capitalize()} over {len(self.studies)} data sets"
        folders = [study.folder for study in self.studies]
        write_report(folders, path, title=title, across=self.figure())
        return Path(path)

    def figure(self) -> Figure:
        """Each method's difference over all data sets with its interval, and its
        difference on each of them."""
        import altair as alt

        names, digits = [c.name for c in self.configs], self.metric.digits
        records = [
            {k: known(v) if isinstance(v, float) else v for k, v in asdict(c).items()}
            | {"row": c.name, "improvement": 100 * c.improvement}
            for c in self.configs
        ]
        single = [
            {"row": c.name, "data": data, "difference": difference}
            for c in self.configs
            for data, difference in c.differences.items()
        ]
        title = f"difference from the baseline in {self.metric.title}"
        y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=360, domain=False))
        x = alt.X("difference:Q", title=title, scale=alt.Scale(zero=True, padding=12))
        kinds = list(dict.fromkeys(c.verdict for c in self.configs))
        looks = [VERDICTS[kind] for kind in kinds]
        legend = alt.Legend(title=None, orient="bottom", symbolSize=110)
        color = alt.Color(
            "verdict:N",
            scale=alt.Scale(domain=kinds, range=[look[0] for look in looks]),
            legend=legend,
        )
        shape = alt.Shape(
            "verdict:N",
            scale=alt.Scale(domain=kinds, range=[look[1] for look in looks]),
            legend=legend,
        )
        base = alt.Chart(alt.Data(values=records)).encode(y=y, color=color)
        ticks = alt.Chart(alt.Data(values=single)).mark_tick(thickness=1.5, height=12, opacity=0.6)
        zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeWidth=1.2)
        layers = [
            zero.encode(x=alt.X("zero:Q", title=title)),
            ticks.encode(x=x, y=y, tooltip=[tip("data:N", "data set"), tip("difference:Q", "d")]),
            base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", title=title), x2="high:Q"),
            base.mark_point(filled=True, size=95, opacity=1).encode(x=x, shape=shape),
        ]
        columns = [ROW, Column("difference", "Difference", digits), Column("low", "From", digits)]
        columns += [
            Column("high", "To", digits),
            Column("new_low", "Further data sets, from", digits),
        ]
        columns += [Column("new_high", "Further data sets, to", digits)]
        columns += [Column("improvement", "Better than a run of the baseline, %", 0)]
        columns += [Column("verdict", "Verdict")]
        caption = (
            f"Point: mean difference over {len(self.studies)} data sets "
            "of equal weight, Holm-corrected over the "
            "methods. Line: its interval for these data sets. Ticks: each data set."
        )
        panels = [Panel("", finish(alt.layer(*layers), max(120, 34 * len(names))))]
        return Figure(
            "across", "Over all data sets", caption, panels, columns, records, wide=True, fixed=True
        )

    def __str__(self) -> str:
        left = (
            f"\nIn one study only, so left out: {', '.join(self.left_out)}."
            if self.left_out
            else ""
        )
        return self.table() + left

    __repr__ = __str__


def combine(studies: Sequence[Study | Path | str]) -> Combined:
    """Answer over several data sets which method is better than the baseline.

    Args:
        studies: of one metric, each on another data set, or their folders. Configurations are
            matched by their names.
    """
    opened = [study if isinstance(study, Study) else load(study) for study in studies]
    tables = [study.results for study in opened]
    names = _names(opened)
    metrics = {(table.study.metric, table.study.mode) for table in tables}
    problems = []
    if len(opened) < 2:
        problems.append(f"give two or more studies, got {len(opened)}")
    if len(metrics) > 1:
        told = ", ".join(sorted(f"{name} ({mode})" for name, mode in metrics))
        problems.append(f"the studies are judged by different metrics: {told}")
    problems += [
        f"{name} has no baseline to compare with"
        for name, table in zip(names, tables, strict=True)
        if table.main_reference is None
    ]
    if problems:
        raise ConfigError("The combination", problems)
    ((metric, mode),) = metrics
    pairs: dict[str, dict[str, tuple[dict[str, float], dict[str, float]]]] = {}
    for name, table in zip(names, tables, strict=True):
        for entry in (e for e in table.entries if e.reference and not e.same_as):
            theirs = table.entry(entry.reference or "").values
            ours = entry.paired(entry.values)
            if len(ours.keys() & theirs.keys()) >= FEWEST:
                pairs.setdefault(entry.name, {})[name] = (ours, theirs)
    left_out = [name for name, found in pairs.items() if len(found) < 2]
    kept = {name: found for name, found in pairs.items() if len(found) >= 2}
    if not kept:
        raise ConfigError(
            "The combination",
            [
                f"no method has {FEWEST} shared seeds on two data "
                "sets; names must agree between the studies"
            ],
        )
    sign = 1.0 if mode == "max" else -1.0
    configs = across(kept, sign)
    return Combined(opened, describe(metric), configs, left_out)


def _names(studies: Sequence[Study]) -> list[str]:
    """The data set of each study; the study's folder where two have the same."""
    found = []
    for study in studies:
        data = study.plan.first_run(study.plan.configs[0]).data
        found.append(str(data.get("source") or data.get("name") or study.folder.name))
    return [
        name if found.count(name) == 1 else f"{name} ({study.folder.name})"
        for name, study in zip(found, studies, strict=True)
    ]


Values = Mapping[str, float]


def across(
    pairs: Mapping[str, Mapping[str, tuple[Values, Values]]], sign: float = 1.0
) -> list[Across]:
    """Every configuration over its data sets, best first.

    Args:
        pairs: by configuration and data set the values of the configuration and
            of the baseline, by seed.
        sign: 1 where more is better, -1 where less is.
    """
    differences = {
        name: {data: paired_differences(*pair) for data, pair in found.items()}
        for name, found in pairs.items()
    }
    tested = {name: _mean_test(list(found.values())) for name, found in differences.items()}
    p = [found[2] for found in tested.values()]
    levels, decided = holm_levels(p)
    made = []
    for i, (name, found) in enumerate(differences.items()):
        mean, error, _, freedom = tested[name]
        half = t_quantile(freedom, levels[i]) * error if error else 0.0
        means = {data: statistics.fmean(d) for data, d in found.items()}
        new = t_interval(list(means.values())) if len(means) >= 3 else (math.nan, math.nan)
        chance, low, high = improvement(list(pairs[name].values()), sign)
        word = "inconclusive"
        if decided[i] and mean:
            word = "better" if mean * sign > 0 else "worse"
        made.append(
            Across(
                name, mean, mean - half, mean + half, levels[i], p[i], holm(p)[i], *new, chance, low, high, word, means
            )
        )  # fmt: skip
    return sorted(made, key=lambda c: -sign * c.difference)


def _mean_test(samples: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """The mean of the means of several samples, its standard error, p of 'it is 0' and the degrees
    of freedom (Welch and Satterthwaite); for one sample this is the t test."""
    from scipy.special import stdtr

    mean = statistics.fmean(statistics.fmean(d) for d in samples)
    parts = [(deviation(d) ** 2 / len(d) / len(samples) ** 2, len(d) - 1) for d in samples]
    variance = math.fsum(v for v, _ in parts)
    if not variance > 0:
        return mean, 0.0, 1.0, 1.0  # no sample varies: nothing to test by
    freedom = variance**2 / math.fsum(v**2 / f for v, f in parts)
    error = math.sqrt(variance)
    return mean, error, float(2 * stdtr(freedom, -abs(mean) / error)), freedom


def improvement(
    pairs: Sequence[tuple[Values, Values]], sign: float = 1.0
) -> tuple[float, float, float]:
    """The probability of improvement, mean over data sets, with its 95 % bootstrap interval.

    Args:
        pairs: of each data set the values of the configuration and of the baseline, by seed.
        sign: 1 where more is better, -1 where less is.

    >>> improvement([({"0": 2.0, "1": 3.0, "2": 4.0}, {"0": 1.0, "1": 2.0, "2": 1.5})])[0]
    0.9444444444444444
    """
    import numpy as np

    rng, drawn, observed = np.random.default_rng(0), [], []
    for ours, theirs in pairs:
        shared = [s for s in ours if s in theirs]
        a, b = (sign * np.array([row[s] for s in shared]) for row in (ours, theirs))
        wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
        observed.append(wins.mean())
        chosen = rng.integers(0, len(shared), (DRAWS, len(shared)))
        drawn.append(wins[chosen[:, :, None], chosen[:, None, :]].mean(axis=(1, 2)))
    low, high = np.quantile(np.mean(drawn, axis=0), [LEVEL / 2, 1 - LEVEL / 2])
    return float(np.mean(observed)), float(low), float(high)
