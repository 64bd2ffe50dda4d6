"""The three answers on top of a report, in words: which method, at what cost,
and how far to trust it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dampen.studies.report.settings import more_seeds, regularize_line
from dampen.studies.stats import FEWEST, POWER
from dampen.studies.store import LoggedRun
from dampen.studies.table import TRAINED, Entry, ResultTable
from dampen.studies.verdict import KINDS, NO_VARIATION, Test, judge_pairs

if TYPE_CHECKING:
    from dampen.studies.table import Entry, ResultTable


@dataclass(frozen=True)
class Advice:
    """The three answers, and the row that is recommended."""

    which: Answer
    cost: Answer
    trust: Answer
    pick: str | None
    code: str = ""  # the line of Python that puts the recommended method into a model
    seeds: str = ""  # the command that adds seeds to inconclusive methods
    rule: str = ""  # how the recommended method was chosen


def advise(table: ResultTable) -> Advice:
    """Read the table for someone in a hurry.

    Args:
        table: the runs of a study, judged.
    """
    reference = table.main_reference
    better = [
        e
        for e in table.ranked()
        if e.verdict == "better" and not e.same_as and reference and e.reference == reference.name
    ]
    pick = _recommended(better, table)
    return Advice(
        _which(table, reference, better, pick),
        _cost(table, pick),
        trust(table),
        pick.name if pick else None,
        regularize_line(pick, reference) if pick else "",
        more_seeds(table),
        RULE.format(baseline=reference.name) if pick and reference else "",
    )


QUESTIONS = ("Which method should I use here?", "What does it cost?", "Can I trust it?")


def answered(advice: Advice) -> list[tuple[str, str]]:
    """Each question with its answer as text, for a terminal.

    Args:
        advice: the three answers.
    """
    parts = (advice.which, advice.cost, advice.trust)
    shown = [
        (question, f"{part.headline}. {' '.join(part.first)}".replace("..", "."))
        for question, part in zip(QUESTIONS, parts, strict=True)
    ]
    if advice.rule:
        shown[0] = (shown[0][0], f"{shown[0][1]} {advice.rule}")
    return shown


def _recommended(better: list[Entry], table: ResultTable) -> Entry | None:
    """Among methods significantly better than the reference and not significantly worse than the
    best: the best mean whose step is not more expensive than another's beyond
    timing noise. See `RULE`."""
    if not better:
        return None
    best = better[0]
    test: Test = "sequential" if table.study.test == "sequential" else "fixed"
    against = judge_pairs(
        {e.name: (e.values, best.values) for e in better[1:]},
        table.metric,
        better=table.study.mode,
        test=test,
    )
    equals = [best, *(e for e in better[1:] if against[e.name].verdict != "worse")]
    return next(e for e in equals if not any(dearer(e, other) for other in equals))


def dearer(entry: Entry, other: Entry) -> bool:
    """Whether a step takes longer than another method's beyond timing noise:
    the intervals do not touch.

    Args:
        entry: the results of one configuration.
        other: the results of another.
    """
    (low, _), (_, high) = entry.cost.interval, other.cost.interval
    return entry.cost.differs and low > (1 + NEGLIGIBLE) * high


NEGLIGIBLE = 0.03
"""A step that takes this much longer decides nothing."""
RULE = (
    "The rule: of the methods that are significantly better than {baseline} "
    "and not significantly worse than the best "
    "of them, the one with the best mean; a more expensive one is passed over "
    "only if the intervals of the step times "
    "do not overlap."
)


def _which(
    table: ResultTable, reference: Entry | None, better: list[Entry], pick: Entry | None
) -> Answer:
    if reference is None:
        return _best_without_reference(table)
    compared, name = table.compared(), table.reference_name
    if not any(e.summary.n for e in table.entries):
        failed = [e.name for e in table.entries if e.verdict == "failed"]
        told = f"Failed: {listed(failed)}." if failed else "No run has finished yet."
        return Answer("No result yet", [told], "caution")
    elsewhere = [
        e.name for e in compared if e.verdict == "better" and e.reference != reference.name
    ]
    told_elsewhere = [f"Better than {name}: {listed(elsewhere)}."] if elsewhere else []
    if pick is not None:
        details = [
            f"{_gain(pick, table)} against {reference.name}, over "
            f"{plural(shared_seeds(pick), 'shared seed')}."
        ]
        details[0] += _selected(pick, table)
        if pick.comparison and pick.comparison.caution:
            details.append(f"Caution: {pick.comparison.caution}.")
        rivals = _rivals(pick, table)
        if rivals:
            details.append(f"Not significantly different from it: {listed(rivals)}.")
        others = [e.name for e in better if e is not pick and e.name not in rivals]
        if others:
            details.append(f"Also better than {reference.name}: {listed(others)}.")
        return Answer(
            f"Use {pick.name}", [*details, *told_elsewhere, *_others(compared, table)], "good"
        )
    if elsewhere:
        return Answer("It depends on the model", [*told_elsewhere, *_others(compared, table)])
    if not any(e.comparison and e.comparison.p is not None for e in compared):
        if any(e.comparison and e.comparison.because == NO_VARIATION for e in compared):
            one = f"{NO_VARIATION.capitalize()}, so all seeds together are one observation."
            return Answer("No verdict", [one, SEED], "caution")
        few = f"Every comparison has fewer than {FEWEST} shared seeds, too few for a test."
        more = "Run more seeds per method; --until-decided adds them."
        return Answer("Too few runs", [few, more], "caution")
    if all(e.verdict != "inconclusive" for e in compared):
        all_ = plural(len(compared), "conclusive comparison")
        found = f"No method significantly outperforms {name}, in {all_}."
        return Answer(f"Stay with {name}", [found, *_others(compared, table)])
    found = f"No method is significantly better than {name}."
    return Answer("Inconclusive", [found, *_others(compared, table)])


SEED = "Use trial.seed for the weights, the split and the order of batches."


def _gain(entry: Entry, table: ResultTable) -> str:
    c, metric = entry.comparison, table.metric
    if c is None:
        return ""
    interval = (
        "" if math.isnan(c.low) else f" ({c.low:+.{metric.digits}f} to {c.high:+.{metric.digits}f})"
    )
    return f"{c.difference:+.{metric.digits}f}{metric.points}{interval}"


def _selected(entry: Entry, table: ResultTable) -> str:
    """How much of a difference is left without the optimism of picking what is significant
    (winner's curse)."""
    shrunk, digits = entry.comparison.shrunk if entry.comparison else math.nan, table.metric.digits
    if math.isnan(shrunk):
        return ""
    return (
        " A difference that was picked because it is "
        f"significant is optimistic: {shrunk:+.{digits}f}"
        f"{table.metric.points} is its median-unbiased estimate."
    )


def _rivals(pick: Entry, table: ResultTable) -> list[str]:
    """The methods that are not significantly different from the recommended one."""
    kept = [e for e in table.contenders() if e is not pick and e is not table.main_reference]
    return [e.name for e in kept]


def _others(compared: list[Entry], table: ResultTable) -> list[str]:
    """What became of the rows that are not better, a sentence per verdict."""
    by_word = {
        w: [e for e in compared if e.verdict == w]
        for w in ("equal", "worse", "no gain", "inconclusive")
    }
    told = []
    if some := [f"{e.name} ({e.failures.in_words()})" for e in compared if e.verdict == TRAINED]:
        told.append(f"Better where it trained: {listed(some)}.")
    if by_word["equal"]:
        margin = f"{table.margin:g}{table.metric.points}"
        told.append(f"Equal within {margin}: {listed([e.name for e in by_word['equal']])}.")
    if by_word["worse"]:
        told.append(f"Worse: {listed([e.name for e in by_word['worse']])}.")
    if by_word["no gain"]:
        told.append(f"No gain of the margin: {listed([e.name for e in by_word['no gain']])}.")
    open_ = [e for e in by_word["inconclusive"] if e.comparison and e.comparison.p is not None]
    if open_:
        nearest = min(
            open_, key=lambda e: (e.comparison.needed if e.comparison else None) or math.inf
        )
        c = nearest.comparison
        told.append(f"Inconclusive: {listed([e.name for e in open_])}.")
        if c and c.needed:
            seeds = f"{c.needed_from:,} to {c.needed:,} seeds"
            told.append(f"Closest to significance: {nearest.name} (about {seeds} needed).")
    few = [
        e.name
        for e in by_word["inconclusive"]
        if not e.comparison or (e.comparison.p is None and not e.comparison.because)
    ]
    constant = [e.name for e in compared if e.comparison and e.comparison.because == NO_VARIATION]
    told += [f"No verdict, {NO_VARIATION}: {listed(constant)}."] if constant else []
    failed = [e.name for e in table.entries if e.verdict == "failed"]
    told += [f"Too few runs to judge: {listed(few)}."] if few else []
    return told + ([f"Failed: {listed(failed)}."] if failed else [])


def _best_without_reference(table: ResultTable) -> Answer:
    """Nothing to test against: what validation prefers, with its test result."""
    entries = [e for e in table.selected() if e.valid is not None]
    if not entries:
        return Answer(
            "No finished run yet", ["Results appear when the first runs finish."], "caution"
        )
    best = max(
        entries, key=lambda e: (e.valid or 0.0) if table.study.mode == "max" else -(e.valid or 0.0)
    )
    told = f"Best on validation; test {table.metric.label} {best.summary.mean:.2f}"
    return Answer(
        best.name,
        [f"{told} over {plural(best.summary.n, 'run')}.", "There is no baseline to test against."],
    )


SAME_TIME = "No significant difference in the time of a step"
"""The headline where the intervals of the ratios contain 1."""
SMALL_STEP = 0.03
"""Seconds. Of a step this short a good part is Python's, and so is what a method adds to it."""


def _cost(table: ResultTable, pick: Entry | None) -> Answer:
    known = [e for e in table.entries if e.cost.ratio and e.reference]
    if not known:
        seconds = [e.cost.train_seconds for e in table.entries if e.cost.train_seconds]
        if seconds:
            told = [
                f"Training took {min(seconds):.3g} to {max(seconds):.3g} s per run.",
                "There is no baseline for a cost ratio.",
            ]
            return Answer(f"{sum(seconds) / len(seconds):.3g} s per run", told)
        return Answer(
            "Cost not known",
            ["No two runs of one seed on the same machine give a ratio of step times."],
        )
    low, high = (
        min(known, key=lambda e: e.cost.ratio or 0),
        max(known, key=lambda e: e.cost.ratio or 0),
    )
    spread = f"All methods here: {low.cost.ratio:.2f}x ({low.name}) to {high.cost.ratio:.2f}x ({high.name})."
    spread = spread if low is not high else f"Of {low.name}; no other method has a cost yet."
    note = small_model_note(table)
    measure = (
        note or "Median ratio of step times over shared seeds; dampen bench measures it closer."
    )
    if pick is None or pick.cost.ratio is None:
        if not any(e.cost.differs or math.isnan(e.cost.interval[0]) for e in known):
            return Answer(SAME_TIME, [spread, measure])
        one = (
            f"{low.cost.ratio:.2f}x"
            if low is high
            else f"{low.cost.ratio:.2f}x to {high.cost.ratio:.2f}x"
        )
        return Answer(f"{one} a step", [spread, measure])
    saved = pick.cost.ratio
    tone = "good" if saved <= 1.1 else "plain" if saved <= 1.5 else "caution"
    low_end, high_end = pick.cost.interval
    if math.isnan(low_end):
        range_ = f"Over {plural(pick.cost.n, 'seed')}, too few for an interval. "
        return Answer(f"{saved:.2f}x the time of a step", [range_ + spread, measure], tone)
    interval = f"95 % interval {low_end:.2f}x to {high_end:.2f}x"
    if pick.cost.differs:
        return Answer(f"{saved:.2f}x the time of a step", [f"{interval}. {spread}", measure], tone)
    range_ = f"{pick.name}: {saved:.2f}x, {interval}. "
    return Answer(SAME_TIME, [range_ + spread, measure], "good" if high_end <= 1.1 else "plain")


def small_model_note(table: ResultTable) -> str:
    """Why ratios of a small model are no guide to a large one; empty where steps are long enough.

    Args:
        table: the runs of a study, judged.
    """
    reference = table.main_reference
    step = reference.cost.step_seconds if reference else None
    if not step or step > SMALL_STEP:
        return ""
    return (
        f"A step of this small model takes {1000 * step:.0f} ms, most of "
        "it spent outside the arithmetic, so a few "
        "extra operations weigh much here and little in a model of usual "
        "size: see docs/costs.md or run dampen bench."
    )


@dataclass(frozen=True)
class Answer:
    """A headline and the sentences behind it."""

    headline: str
    details: list[str]
    tone: str = "plain"  # good, plain, caution: how a page may color it
    foremost: tuple[str, ...] = ()  # the details that are never left out; () means all

    @property
    def first(self) -> list[str]:
        """The details that a terminal prints, and a page before a click."""
        return [line for line in self.details if not self.foremost or line in self.foremost]

    @property
    def rest(self) -> list[str]:
        """The other details."""
        return [line for line in self.details if line not in self.first]


def shared_seeds(entry: Entry) -> int:
    """How many seeds the row shares with its reference.

    Args:
        entry: the results of one configuration.
    """
    return entry.comparison.n if entry.comparison else 0


def trust(table: ResultTable) -> Answer:
    """What the table could have shown, and every reason against it. Failed rows say so themselves
    and count here only where runs are missing from means.

    Args:
        table: the runs of a study, judged.
    """
    compared = table.compared()
    tested = [e for e in compared if e.comparison and e.comparison.p is not None]
    decided = [e for e in tested if e.verdict != "inconclusive"]
    total = plural(len(compared), "comparison")
    against = _reservations(table)
    basis = _basis(table, tested)
    if not tested:
        count = max((shared_seeds(e) for e in compared), default=0)
        what = f"Little: {plural(count, 'shared seed')}" if compared else "Nothing to test against"
        foremost = (*basis, *against)
        return Answer(what, [*basis, *against, *noise(table)], "caution", foremost)
    if len(decided) == len(compared):
        headline, tone = f"Well founded: {total} conclusive", "good"
        if len(compared) > 1:
            headline = f"Well founded: all {total} conclusive"
    elif len(decided) >= len(compared) / 2:
        headline, tone = f"Good: {len(decided)} of {total} conclusive", "good"
    else:
        headline, tone = f"Weak: {len(decided)} of {total} conclusive", "caution"
    if against:
        headline, tone = f"{headline}, with reservations", "plain" if tone == "good" else tone
    power = _power(table, tested)
    foremost = (*power, basis[0], tuned(table), *against)
    return Answer(headline, [*power, *basis, *against, *noise(table)], tone, foremost)


def smallest_difference(table: ResultTable) -> float:
    """The difference that the middle row of this table shows with power 0.8; NaN
    where nothing was tested.

    Args:
        table: the runs of a study, judged.
    """
    found = [
        e.comparison.detectable
        for e in table.compared()
        if e.comparison and e.comparison.n >= FEWEST
    ]
    return statistics.median(found) if found else math.nan


def _power(table: ResultTable, tested: list[Entry]) -> list[str]:
    smallest, metric = smallest_difference(table), table.metric
    fewest, most = min(map(shared_seeds, tested)), max(map(shared_seeds, tested))
    seeds = plural(most, "seed") if fewest == most else f"{fewest} to {most} seeds"
    difference = f"{smallest:.{metric.digits}f}{metric.points}"
    power = f"With {seeds} this study has {100 * POWER:.0f} % power to detect a difference of {difference}."
    if not table.margin:
        return [power]
    return [f"{power} The equivalence margin is {table.margin:g}{metric.points}."]


def _basis(table: ResultTable, tested: list[Entry]) -> list[str]:
    test = KINDS["sequential" if table.study.test == "sequential" else "fixed"]
    told = (
        [
            f"{test[0].upper()}{test[1:]}, corrected for "
            f"{plural(len(table.compared()), 'comparison')} by Holm."
        ]
        if tested
        else []
    )
    return [line for line in (*told, tuned(table), what_was_tested(table)) if line]


def tuned(table: ResultTable) -> str:
    """Whether each row had its settings searched, in a sentence.

    Args:
        table: the runs of a study, judged.
    """
    search = table.study.search
    if search:
        seeds = (
            f" on tuning seeds {listed([str(s) for s in search['seeds']])}"
            if search.get("seeds")
            else ""
        )
        if search.get("storage") == "tuning":
            return _tuned_equally(table, seeds)
        return f"Settings were tuned: {search.get('trials', '?')} runs for every method{seeds}, scored on validation."
    most = max((len(row.settings) for row in table.study.configs), default=1)
    if most > 1 and not table.study.show_all:
        return f"Each method is shown at the grid point selected on validation, of up to {most}."
    return "Hyperparameters were not tuned: each method was run at the setting listed."


def _tuned_equally(table: ResultTable, seeds: str) -> str:
    """What was tried of every row, which choices lie at the end of a range, and where settings tie
    on validation."""
    search, names = table.study.search, [row.name for row in table.study.configs]
    rows = {name: search["rows"][name] for name in names if name in search["rows"]}
    further = sum(bool(row.get("extended")) for row in rows.values())
    edge = [name for name, row in rows.items() if row.get("edges")]
    tied = [name for name, row in rows.items() if row.get("tied", 1) > 1]
    fixed = [name for name in names if name not in rows]
    several = plural(search["settings"], "setting")
    if second := search.get("strength_settings"):
        several += f" ({second} of them of the strength alone, or of a method without one close to its best)"
    told = [
        f"Settings were tuned: {several} of every method, the baseline too, "
        f"selected by the mean on validation{seeds}."
    ]
    told += [
        f"{plural(further, 'method')} had the best setting at the end "
        "of a range, which was then extended once."
    ] * bool(further)
    told += [f"Still at the end of a range: {listed(edge)}."] * bool(edge)
    told += [f"Best settings tie on validation, the middle one was taken: {listed(tied)}."] * bool(
        tied
    )
    told += [f"Nothing to tune: {listed(fixed)}."] * bool(fixed)
    if "test" in _redrawn(table.study.runs()):
        told.append(
            "The test set is drawn anew for each seed, so it holds "
            "examples on which settings were selected, "
            "the same for every method."
        )
    return " ".join(told)


def what_was_tested(table: ResultTable) -> str:
    """Which weights were tested, and what chose them, in a sentence.

    Args:
        table: the runs of a study, judged.
    """
    configs = [run.config for run in table.study.runs()]
    if not configs:
        return ""
    if any(config.get("function") for config in configs):
        return "Your function measured the test metrics itself. Make sure that split was not used for model selection."
    kept = {config.get("train", {}).get("select", "best") for config in configs}
    if kept == {"last"}:
        return "Every run was tested once, after its last epoch."
    return "The tested epoch was selected on validation. The test set was used once."


def noise(table: ResultTable) -> list[str]:
    """What seeds vary and what they do not, and so what the intervals cover.

    Args:
        table: the runs of a study, judged.
    """
    runs = table.study.runs()
    varied = _varied([run.config for run in runs], _redrawn(runs))
    return (
        [varied + (_test_set(table) if varied.endswith(SAME_TEST) else "") + "."] if varied else []
    )


SAME_TEST = "the test set is the same in every run"


def _redrawn(runs: list[LoggedRun]) -> list[str]:
    """Which splits each seed drew anew: those that the study draws itself, unless a number fixed
    them. Records of format 1 kept a test split that was drawn."""
    if not runs:
        return []
    data = runs[0].config.get("data", {})
    first = {"valid": data.get("split_seed") == "seed", "test": data.get("test_seed") == "seed"}
    if runs[0].config.get("format", 1) < 2:
        return [name for name, anew in first.items() if anew]
    drawn: list[str] = next(
        (r.final.data.get("drawn", []) for r in runs if r.final and r.status == "finished"), []
    )
    return [name for name, anew in first.items() if anew and name in drawn]


def _varied(configs: list[dict[str, Any]], redrawn: list[str]) -> str:
    """What differs between seeds, in words; ends with `SAME_TEST` where all are tested
    on the same examples."""
    if not configs:
        return ""
    if any(config.get("function") for config in configs):
        return "Seeds vary what your function draws, which may include the splits of the data"
    data = configs[0].get("data", {})
    if data.get("folds"):
        return (
            "Seeds vary initial weights, order of batches and the "
            f"{data['folds']} folds: every example is tested once "
            "per seed, so intervals cover the draw of the splits too"
        )
    if redrawn == ["valid"]:
        return (
            "Seeds vary initial weights, order of batches and the split into "
            "training and validation, which is drawn "
            f"anew for each; {SAME_TEST}"
        )
    if redrawn:
        return (
            "Seeds vary initial weights, order of batches and the split into "
            "training, validation and test, which is "
            "drawn anew for each, so that intervals cover the draw of the test set too"
        )
    if data.get("split_seed") == "seed":
        return f"Seeds vary initial weights and order of batches; training and validation are given, and {SAME_TEST}"
    return (
        "Seeds vary initial weights and order of batches; every run trains "
        "on the same split (data.split_seed=seed "
        f"would draw it anew for each seed), and {SAME_TEST}"
    )


def _test_set(table: ResultTable) -> str:
    """The standard error that the size of the test set alone leaves, where the metric is a share of
    its examples."""
    finals = [r.final for r in table.study.runs() if r.final and r.status == "finished"]
    counts = {f.data.get("examples", {}).get("test") for f in finals} - {None}
    reference, metric = table.main_reference, table.metric
    if len(counts) != 1 or not metric.noisy_by_count or not reference or not reference.summary.n:
        return ""
    (count,), share = counts, reference.summary.mean / metric.scale
    error = metric.scale * math.sqrt(max(0.0, share * (1 - share)) / count)
    return (
        f": its {count:,} examples alone leave a standard error of "
        f"{error:.2f}{metric.points} on any {metric.label}, "
        "which no number of seeds removes (all methods share it, so differences suffer less)"
    )


def _reservations(table: ResultTable) -> list[str]:
    study, against = table.study, []
    some = [e for e in table.entries if e.summary.n]
    diverged = sum(e.diverged for e in some)
    if diverged:
        verb = "is" if diverged == 1 else "are"
        against.append(f"{plural(diverged, 'run')} diverged and {verb} not in the means.")
    unfinished = sum(e.unfinished for e in table.entries if e.verdict != "failed")
    if unfinished:
        against.append(f"{unfinished} of {study.planned()} planned runs not finished.")
    against += _mixed(study.runs())
    for path, names in table.kernels().items():
        against.append(f"On {path} kernels: {listed(names)}. Other kernels draw other masks.")
    if any(r.final and r.final.data.get("partial") for r in study.runs()):
        against.append("The copy of the data set is not complete.")
    return against


def _mixed(runs: list[LoggedRun]) -> list[str]:
    """Differences between the places where the runs were made."""
    last = [r.sessions[-1] for r in runs if r.sessions and r.sessions[-1]]
    told = []
    machines = {(s.get("cpu"), s.get("device"), s.get("threads")) for s in last}
    if len(machines) > 1:
        told.append(f"Runs come from {len(machines)} different machines or thread counts.")
    versions = {
        (s.get("packages", {}).get("torch"), s.get("packages", {}).get("dampen")) for s in last
    }
    if len(versions) > 1:
        told.append(f"Runs come from {len(versions)} different versions of torch or dampen.")
    commits = {s.get("commit") for s in last if s.get("commit")}
    if len(commits) > 1:
        told.append(f"Runs come from {len(commits)} different commits.")
    return told


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    Args:
        count: how many.
        noun: in the singular.

    >>> plural(1, "seed"), plural(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counted(entry: Entry, table: ResultTable) -> str:
    """Values of a row and how many were planned; the folds of a round of
    cross-validation make one value.

    Args:
        entry: the results of one configuration.
        table: the runs of a study, judged.
    """
    return f"{entry.summary.n}/{entry.setting.planned // (table.study.header.get('folds') or 1)}"


def listed(names: list[str], most: int = 4) -> str:
    """Names in a sentence, not too many of them.

    Args:
        names: the names, in order.
        most: how many at most.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    shown = names[:most]
    rest = len(names) - len(shown)
    if rest:
        return ", ".join(shown) + f" and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def shortened(name: str, most: int = 24) -> str:
    """A name that fits beside a point.

    Args:
        name: the whole name.
        most: how many at most.

    >>> shortened("feed_forward_dropout (feed-forward)")
    'feed_forward_dropout (f…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"
