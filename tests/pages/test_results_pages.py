"""docs/results.md, docs/real_data.md and docs/costs.md say what the committed records say."""

import html
import json
import re

import pytest

from benchmarks import costs_page, detection_page, lambda_page, questions, rates_page, real_data, regimes, reproductions
from benchmarks.maps_picture import maps_picture
from dampen.lab.report import make_report
from tests.lab.synthetic_runs import write_study

STUDIES = [name for name in reproductions.STUDIES if (reproductions.RECORDS / f"{name}.json").exists()]


def test_the_pages_are_up_to_date():
    assert reproductions.main(["--check"]) == 0, "run `python -m benchmarks.reproductions`"
    assert real_data.main(["--check"]) == 0, "run `python -m benchmarks.real_data`"
    assert costs_page.main(["--check"]) == 0, "run `python -m benchmarks.costs_page`"
    assert detection_page.main(["--check"]) == 0, "run `python -m benchmarks.detection_page`"
    assert questions.main(["--check"]) == 0, "run `python -m benchmarks.questions`"
    assert regimes.main(["--check"]) == 0, "run `python -m benchmarks.regimes`"
    assert lambda_page.main(["--check"]) == 0, "run `python -m benchmarks.lambda_page`"
    assert rates_page.main(["--check"]) == 0, "run `python -m benchmarks.rates_page`"


def test_every_study_has_its_record():
    assert list(reproductions.STUDIES) == STUDIES


@pytest.mark.parametrize("study", STUDIES)
def test_records_are_whole(study):
    """Every planned run is there, with enough seeds, and says where it ran; no path of a machine, no weights."""
    path = reproductions.RECORDS / f"{study}.json"
    report = make_report([path])
    (table,) = report.tables
    assert not report.skipped
    runs = table.study.runs()
    assert len(runs) == table.study.planned()
    assert all(run.status in ("finished", "diverged") for run in runs)
    seeds = {run.seed for run in runs}
    assert len(seeds) >= (1 if table.study.show_all else 3)
    assert all(run.sessions[-1]["cpu"] and run.sessions[-1]["packages"]["torch"] for run in runs)
    assert re.findall(r"(?<![\w.:/])/\w+/\w+", path.read_text()) == []  # no path of any machine


def test_the_detector_is_far_above_boxes_at_the_mean_places():
    table = detection_page.table()
    chance = json.loads(detection_page.CHANCE.read_text())["one box a class"]["ap50"]
    assert all(entry.metrics["ap50"].mean > max(20, 20 * 100 * chance) for entry in table.entries)
    assert all(run.final.detections for run in table.study.runs())


def test_real_runs_are_clearly_above_chance():
    record = json.loads(real_data.RECORD.read_text())
    assert list(record) == list(real_data.SETS)
    for name, entry in record.items():
        chance = entry["chance"]["value"]
        value = entry["run"]["test"][entry["metric"]]
        above = value < 0.8 * chance if entry["mode"] == "min" else value > 2 * chance
        assert above, f"{name}: {value} against {chance}"


def test_a_claim_is_shown_contradicted_or_neither_as_the_numbers_are():
    from benchmarks.claimed import Claim
    from benchmarks.claims import judged, told

    steady = {str(seed): 50.0 + seed for seed in range(6)}
    values = {
        "plain": {"accuracy": steady},
        "up": {"accuracy": {s: v + 3 + 0.1 * int(s) for s, v in steady.items()}},
        "noise": {"accuracy": {s: v + (-4) ** (int(s) % 2) for s, v in steady.items()}},
    }
    asked = [Claim("p", "gains", "r", "up", "plain"), Claim("p", "loses", "r", "up", "plain", "worse")]
    asked.append(Claim("p", "gains", "r", "noise", "plain"))
    found = judged(values, asked)
    assert [told(c, found[c]).partition(":")[0].partition(",")[0] for c in asked] == [
        "shown",
        "contradicted",
        "not decided",
    ]
    assert told(Claim("p", "x", untestable="no GPU"), None) == "not testable here: no GPU"
    assert told(asked[0], None) == "not run yet"


def test_studies_are_counted_by_the_regime_of_their_plain_training():
    cases = regimes.cases()
    assert [c.train / c.test for c in cases] == sorted(c.train / c.test for c in cases)
    memorized, underfitted = cases[0], cases[-1]
    assert memorized.overfits
    assert not underfitted.overfits
    told = regimes.answer([memorized, underfitted])
    assert f"overfits (1 study), {memorized.better()} of {memorized.rows()} rows are shown better" in told
    assert f"does not (1 study), {underfitted.better()} of {underfitted.rows()} rows" in told
    assert f"and {underfitted.worse()} worse" in told


def test_the_picture_of_attention_maps_has_one_of_every_row(tmp_path):
    write_study(tmp_path / "looked_at", diagnose=True)
    write_study(tmp_path / "not")
    table = make_report([tmp_path / "looked_at"]).tables[0]
    svg = maps_picture(table)
    assert svg.count("<image ") == 1 + len(table.entries)
    assert all(f">{html.escape(entry.name)}</text>" in svg for entry in table.entries)
    assert maps_picture(make_report([tmp_path / "not"]).tables[0]) is None
