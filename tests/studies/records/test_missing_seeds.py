"""Seeds that diverged, failed or gave no number: shown per configuration, and never passed over in an answer."""

import json

import pytest
from scipy.stats import fisher_exact

from dampen.studies.comparison import Comparison
from dampen.studies.report import FORMATS, make_report
from dampen.studies.report.summary import QUESTIONS, advise, answered
from dampen.studies.store import RunStore
from dampen.studies.table import TRAINED, comparison_table, read_runs
from tests.studies.synthetic_runs import write_study


def diverge(folder, plan, row, seeds):
    """Replace the results of these seeds by a divergence."""
    (config,) = (c for c in plan.configs if c.name == row)
    for seed in seeds:
        store = RunStore(folder / config.settings[0].ids[str(seed)])
        kept = {k: v for k, v in store.final().items() if k in ("id", "format")}
        store.finish(kept | {"status": "diverged", "reason": "the loss became NaN"})


def break_off(folder, plan, row, seeds):
    """Replace the results of these seeds by an error."""
    (config,) = (c for c in plan.configs if c.name == row)
    for seed in seeds:
        place = folder / config.settings[0].ids[str(seed)]
        (place / "final.json").unlink()
        (place / "error.json").write_text(json.dumps({"message": "train.py, line 3: boom"}))


@pytest.fixture
def study(tmp_path):
    plan = write_study(tmp_path, seeds=8)
    return tmp_path, plan


def table_of(folder):
    plan = Comparison.load(folder)
    return comparison_table(plan, read_runs(plan, folder))


def test_a_better_method_whose_runs_fail_is_better_where_it_trained(study):
    folder, plan = study
    whole = table_of(folder)
    assert whole.entry("R-Drop").verdict == "better"
    diverge(folder, plan, "R-Drop", [1, 4])
    break_off(folder, plan, "R-Drop", [6])
    table = table_of(folder)
    entry = table.entry("R-Drop")
    assert entry.verdict == TRAINED
    assert entry.told(table.metric).startswith("better where it trained, 3 of 8 runs failed")
    assert (entry.failures.failed, entry.failures.runs) == (3, 8)
    p = fisher_exact([[3, 5], [0, 8]]).pvalue
    assert entry.failures.p == pytest.approx(p)
    assert entry.failures.corrected == pytest.approx(min(1, 5 * p))
    assert entry.to_dict()["verdict"] == TRAINED
    answer = advise(table).which
    assert "R-Drop" not in answer.headline
    assert "Better where it trained: R-Drop (3 of 8 runs failed)" in " ".join(answer.details)


def test_only_failures_in_excess_of_the_baselines_count_against_a_method(study):
    folder, plan = study
    diverge(folder, plan, "plain", [1, 2])
    diverge(folder, plan, "R-Drop", [4])
    entry = table_of(folder).entry("R-Drop")
    assert entry.verdict == "better"
    assert entry.told(table_of(folder).metric) == "better; 1 of 8 runs failed"


def test_a_method_that_always_fails_is_significantly_worse_in_its_failures(study):
    folder, plan = study
    diverge(folder, plan, "R-Drop", range(8))
    table = table_of(folder)
    assert table.entry("R-Drop").verdict == "failed"
    assert table.entry("R-Drop").failures.significant
    assert "significantly more than the baseline's 0 of 8" in (
        table.entry("R-Drop").failures.in_words()
    )


def test_every_report_can_be_written_with_seeds_missing(study):
    folder, plan = study
    diverge(folder, plan, "plain", [0])
    diverge(folder, plan, "R-Drop", [1, 2, 3, 4, 5, 6, 7])
    break_off(folder, plan, "Blur", range(8))
    report = make_report([folder])
    for kind in FORMATS:
        assert "R-Drop" in report.render(kind)


def test_contenders_stand_beside_the_best(study):
    folder, _ = study
    table = table_of(folder)
    names = [e.name for e in table.contenders()]
    assert names[0] == table.ranked()[0].name
    assert "Blur" not in names
    assert "plain" not in names
    advice = advise(table)
    told = dict(answered(advice))[QUESTIONS[0]]
    rivals = [name for name in names if name != advice.pick]
    assert rivals
    sentence = told.partition("Not significantly different from it: ")[2].partition(".")[0]
    assert {*sentence.replace(" and ", ", ").split(", ")} == {*rivals}


def test_the_recommended_difference_is_said_to_be_optimistic(study):
    """Winner's curse: beside the mean stands the estimate that selection has not inflated."""
    table = table_of(study[0])
    pick = advise(table).pick
    c = table.entry(pick).comparison
    assert 0 < c.shrunk < c.difference
    assert f"is optimistic: {c.shrunk:+.2f} points is its median-unbiased estimate" in " ".join(
        advise(table).which.details
    )


def test_methods_on_different_kernels_are_said(study):
    folder, plan = study
    for name, path in (("DropKey", "native"), ("R-Drop", "torch")):
        (config,) = (c for c in plan.configs if c.name == name)
        for id in config.settings[0].ids.values():
            store = RunStore(folder / id)
            final = {k: v for k, v in store.final().items() if k != "checksum"}
            store.finish(final | {"kernels": path})
    table = table_of(folder)
    assert table.kernels() == {"native": ["DropKey"], "torch": ["R-Drop"]}
    told = " ".join(advise(table).trust.details)
    assert "On native kernels: DropKey." in told
    assert "On torch kernels: R-Drop." in told
    # a terminal and the page before a click leave nothing of it out
    assert "On torch kernels: R-Drop." in dict(answered(advise(table)))[QUESTIONS[2]]
    assert any("On torch kernels" in line for line in advise(table).trust.first)


def test_a_recommended_method_with_skewed_differences_comes_with_its_caution(study):
    """The expected rate of false claims stands in the answer, not only in the table."""
    folder, plan = study
    (config,) = (c for c in plan.configs if c.name == "DropPath")
    for place, id in enumerate(config.settings[0].ids.values()):
        store = RunStore(folder / id)
        final = {k: v for k, v in store.final().items() if k != "checksum"}
        gain = 0.22 if place == 0 else 0.14
        final["test"] = {**final["test"], "accuracy": 0.9 * final["test"]["accuracy"] + gain}
        store.finish(final)
    table = table_of(folder)
    advice = advise(table)
    c = table.entry(advice.pick).comparison
    assert advice.pick == "DropPath"
    assert c.false_claims is not None
    assert f"Caution: {c.caution}." in advice.which.details
    assert "false claims" in dict(answered(advice))[QUESTIONS[0]]
