"""Several studies as one answer, against scipy and by simulation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as reference

import dampen
from dampen.studies.combine import across, combine, improvement
from dampen.studies.errors import ConfigError
from tests.studies.synthetic_runs import write_study


def as_row(values):
    return {str(i): float(v) for i, v in enumerate(values)}


def pairs_of(rng, effects, seeds, between=0.0):
    """One method on several data sets: the values of its runs and of the baseline's."""
    found = {}
    for k, (effect, n) in enumerate(zip(effects, seeds, strict=True)):
        plain = rng.normal(50 + k, 1.0, n)
        found[str(k)] = (as_row(plain + effect + rng.normal(0, 0.5 + k, n)), as_row(plain))
    return found


def test_one_data_set_is_the_t_test_and_several_are_welchs():
    rng = np.random.default_rng(0)
    one = pairs_of(rng, [0.4], [8])
    (ours, theirs) = one["0"]
    d = np.array(list(ours.values())) - np.array(list(theirs.values()))
    (found,) = across({"a": one})
    assert found.p == pytest.approx(reference.ttest_1samp(d, 0).pvalue)
    assert (found.low, found.high) == pytest.approx(
        tuple(reference.ttest_1samp(d, 0).confidence_interval())
    )
    two = pairs_of(rng, [0.4, 0.8], [6, 9])
    x, y = (np.array(list(a.values())) - np.array(list(b.values())) for a, b in two.values())
    (found,) = across({"a": two})
    # The mean of two means is 0 where one is minus the other: Welch's test of x against -y.
    assert found.p == pytest.approx(reference.ttest_ind(x, -y, equal_var=False).pvalue)
    assert found.difference == pytest.approx((x.mean() + y.mean()) / 2)
    assert math.isnan(found.new_low)


def test_false_claims_over_data_sets_keep_the_level():
    """1,000 combinations of three data sets of unequal noise and size, two methods without an effect."""
    rng, claims = np.random.default_rng(1), 0
    for _ in range(1000):
        rows = {name: pairs_of(rng, [0.0] * 3, [5, 8, 12]) for name in "ab"}
        claims += any(_decided(c) for c in across_quickly(rows))
    assert claims / 1000 < 0.07


def across_quickly(rows):
    from dampen.studies import combine as module

    kept, module.DRAWS = module.DRAWS, 2
    try:
        return across(rows)
    finally:
        module.DRAWS = kept


def _decided(config):
    return config.verdict != "inconclusive"


def test_the_interval_for_further_data_sets_is_of_their_means():
    found = across({"a": pairs_of(np.random.default_rng(2), [0.5, 1.0, 3.0], [8, 8, 8])})[0]
    means = list(found.differences.values())
    expected = reference.t.interval(0.95, 2, np.mean(means), reference.sem(means))
    assert (found.new_low, found.new_high) == pytest.approx(expected)
    assert found.difference == pytest.approx(np.mean(means))


def test_the_probability_of_improvement_is_mann_whitneys():
    rng = np.random.default_rng(3)
    pairs = [(as_row(rng.normal(0.5, 1, 9)), as_row(rng.normal(0, 1, 9))) for _ in range(3)]
    expected = np.mean(
        [
            reference.mannwhitneyu(list(a.values()), list(b.values())).statistic / 81
            for a, b in pairs
        ]
    )
    chance, low, high = improvement(pairs)
    assert chance == pytest.approx(expected)
    assert low < chance < high
    assert improvement(pairs, -1.0)[0] == pytest.approx(1 - expected)


def test_studies_combine_into_one_table_and_one_page(tmp_path):
    for name in ("one", "two", "three"):
        write_study(tmp_path / name, seeds=6, title=f"Synthetic {name}")
    folders = [tmp_path / name for name in ("one", "two", "three")]
    found = dampen.combine(folders)
    assert found.configs[0].name in ("R-Drop", "Explicit v", "DropPath")
    by_name = {c.name: c for c in found.configs}
    assert by_name["R-Drop"].verdict == "better"
    assert by_name["Blur"].verdict == "worse"
    assert "| R-Drop | +" in str(found)
    assert len(found.to_dict()["configs"]) == 5
    page = found.report(tmp_path / "all.md").read_text()
    assert all(f"Synthetic {name}" in page for name in ("one", "two", "three"))
    figure = found.figure()
    assert [r["row"] for r in figure.records] == [c.name for c in found.configs]
    drawn = json.dumps(figure.panels[0].spec)
    assert all(f'"low": {c.low}' in drawn for c in found.configs)
    page = found.report(tmp_path / "all.html").read_text()
    assert '<figure id="across"' in page
    assert "3 data sets of equal weight" in page


def test_what_cannot_be_combined_is_refused(tmp_path):
    write_study(tmp_path / "one", seeds=4)
    with pytest.raises(ConfigError, match="give two or more studies, got 1"):
        combine([tmp_path / "one"])
    rows = {"plain": ([], 0.0, 1.0, None), "Other": ([{"name": "drop_head"}], 0.01, 1.0, None)}
    write_study(tmp_path / "two", rows, seeds=4)
    with pytest.raises(ConfigError, match="no method has 3 shared seeds on two data sets"):
        combine([tmp_path / "one", tmp_path / "two"])


def test_the_command_compares_over_several_data_sets(tmp_path, monkeypatch, capsys):
    """Two small tables of the user's own; one answer over both, and the command for one page."""
    from dampen.cli import main
    from tests.studies.user_files import write_csv

    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("first.csv", "second.csv")):
        write_csv(tmp_path / name, rows=60, seed=seed)
    quick = ["--set", "train.epochs=1", "--set", "train.batch_size=8", "--set", "model.depth=1"]
    arguments = ["--data", "first.csv,second.csv", "--methods", "drop_key", "--seeds", "3"]
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments, *quick])
    assert end.value.code in (0, None)
    told = capsys.readouterr().out
    assert "| drop_key | " in told
    assert "2 data sets" in told
    assert told.splitlines()[-1] == "Report: runs/combined.html"
    assert '<figure id="across"' in Path("runs/combined.html").read_text()
