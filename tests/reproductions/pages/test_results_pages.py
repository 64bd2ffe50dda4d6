"""docs/results.md, docs/real_data.md and docs/costs.md say what the committed records say."""

import html
import json
import re

import pytest

import dampen
from benchmarks import costs_page
from dampen.studies.report import make_report
from reproductions.pages import (
    answers,
    detection_page,
    front_page,
    lambda_page,
    planned,
    questions,
    rates_page,
    real_data,
    regimes,
    tables,
    which_method,
)
from reproductions.pages.maps_picture import maps_picture
from reproductions.pages.publish import committed_report, stated
from tests.studies.synthetic_runs import edit, write_study

STUDIES = [name for name in tables.STUDIES if tables.result_of(name).exists()]


def test_the_pages_are_up_to_date():
    assert tables.main(["--check"]) == 0, "run `python -m reproductions.pages.tables`"
    assert real_data.main(["--check"]) == 0, "run `python -m reproductions.pages.real_data`"
    assert costs_page.main(["--check"]) == 0, "run `python -m benchmarks.costs_page`"
    assert detection_page.main(["--check"]) == 0, (
        "run `python -m reproductions.pages.detection_page`"
    )
    assert questions.main(["--check"]) == 0, "run `python -m reproductions.pages.questions`"
    assert regimes.main(["--check"]) == 0, "run `python -m reproductions.pages.regimes`"
    assert lambda_page.main(["--check"]) == 0, "run `python -m reproductions.pages.lambda_page`"
    assert rates_page.main(["--check"]) == 0, "run `python -m reproductions.pages.rates_page`"
    assert which_method.main(["--check"]) == 0, "run `python -m reproductions.pages.which_method`"
    assert front_page.main(["--check"]) == 0, "run `python -m reproductions.pages.front_page`"


def test_every_study_has_its_record():
    assert list(tables.STUDIES) == STUDIES


@pytest.mark.parametrize("study", STUDIES)
def test_records_are_whole(study):
    """Every planned run is there, with enough seeds, and says where it ran; no path of a machine, no weights."""
    path = tables.result_of(study)
    report = committed_report(path)
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


def studied(folder, task, nll, **config):
    """A study whose plain training ends with this loss and this NLL on the test set."""
    write_study(folder)
    for path in folder.glob("*/final.json"):
        edit(path, train={"task": task}, test={"accuracy": 0.5, "nll": nll})
    for path in folder.glob("*/config.json"):
        content = json.loads(path.read_text())
        edit(path, **{section: {**content[section], **own} for section, own in config.items()})
    return make_report([folder]).tables[0].entries


def test_the_regime_is_that_of_plain_training(tmp_path):
    memorized, underfitted = studied(tmp_path / "a", 0.1, 2.0), studied(tmp_path / "b", 1.6, 2.0)
    assert regimes.losses(memorized) == pytest.approx((0.1, 2.0))
    assert "it overfits" in regimes.regime(memorized)
    assert "it does not overfit" in regimes.regime(underfitted)
    assert regimes.losses([e for e in memorized if e.config.methods]) is None  # no plain row


@pytest.mark.parametrize(
    "config", [{"train": {"label_smoothing": 0.1}}, {"data": {"noise": 0.3}}], ids=str
)
def test_losses_on_other_labels_tell_no_regime(config, tmp_path):
    assert regimes.losses(studied(tmp_path / "a", 1.6, 2.0, **config)) is None


def test_studies_are_counted_by_their_regime():
    cases = regimes.cases()
    shares = [c.train / c.test for c in cases]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < shares[-1]
    told = regimes.answer(cases)
    some = [c for c in cases if c.overfits]
    assert f"({len(some)} studies on {len({c.split for c in some})} independent splits)" in told
    assert len({c.split for c in some}) < len(some)  # studies that share a split count once


def test_studies_on_the_same_examples_share_a_split():
    split = {c.record: c.split for c in regimes.cases()}
    assert (
        split["attentiondrop/results/sweeps_digits-study.json.xz"]
        == split["attentiondrop/results/digits-study.json.xz"]
    )
    assert (
        split["small_data/results/demo.json.xz"]
        != split["attentiondrop/results/digits-study.json.xz"]
    )  # drawn with the seed


def test_all_rows_of_a_page_are_one_family():
    records = [c.record for c in regimes.cases()]
    together = [c for rows in which_method.judged(records).values() for _, c in rows]
    alone = [
        c for record in records for rows in which_method.judged([record]).values() for _, c in rows
    ]
    assert (
        sum(c.corrected > one.corrected for c, one in zip(together, alone, strict=True))
        > len(alone) / 2
    )
    assert all(c.corrected >= one.corrected for c, one in zip(together, alone, strict=True))


def test_every_earlier_study_has_three_sentences_and_an_honest_note():
    for question in questions.QUESTIONS:
        path = questions.RECORDS / question.record
        if path.is_file():
            told = answers.EARLIER[question.slug](committed_report(path).tables[0], path)
            assert len(told) == 3
            assert all(sentence.endswith(".") for sentence in told)
            page = (questions.DOCS / "results" / f"{question.slug}.md").read_text()
            assert " ".join(told) in page
            assert "**Limits of this study.**" in page
            assert page.count("](../images/") == 1


def test_a_study_that_the_plan_asked_again_points_there(monkeypatch):
    old = next(q for q in questions.QUESTIONS if q.superseded_by == "attentiondrop/trends")
    assert old.successor is None or planned.result(old.superseded_by).is_file()
    monkeypatch.setattr(planned, "result", lambda name: questions.RECORDS / old.record)
    assert old.successor.slug == "trends"


def test_lines_to_copy_are_methods():
    lines = re.findall(r"`(\[?[A-Z]\w+\(.*?)`", which_method.PAGE.read_text())
    assert lines
    names = {name: getattr(dampen, name) for name in which_method.CLASSES.values()}
    for line in lines:
        made = eval(line, names)
        assert all(
            isinstance(m, dampen.Regularizer) for m in (made if isinstance(made, list) else [made])
        )


def test_a_sentence_that_no_longer_holds_fails_the_build():
    assert stated("It is so.", True) == "It is so."
    with pytest.raises(ValueError, match=r"write it anew: It is so\."):
        stated("It is so.", True, False)


def test_the_picture_of_attention_maps_has_one_of_every_row(tmp_path):
    write_study(tmp_path / "looked_at", diagnose=True)
    write_study(tmp_path / "not")
    table = make_report([tmp_path / "looked_at"]).tables[0]
    svg = maps_picture(table)
    assert svg.count("<image ") == 1 + len(table.entries)
    assert all(f">{html.escape(entry.name)}</text>" in svg for entry in table.entries)
    assert maps_picture(make_report([tmp_path / "not"]).tables[0]) is None
