"""Run folders are read, listed or refused; all runs here are synthetic."""

import json
import shutil

import pytest

from dampen.studies.errors import LabError
from dampen.studies.report import make_report, write_report
from dampen.studies.report.read import ProtocolMismatch
from dampen.studies.report.summary import advise
from dampen.studies.run import Run
from tests.studies.synthetic_runs import edit, loose, write, write_study, write_trial


def test_damaged_and_empty_folders_are_listed_with_the_reason_and_skipped(tmp_path):
    plan = write_study(tmp_path / "s")
    ids = list(plan.runs)
    folders = [tmp_path / "s" / i for i in ids]
    text = (folders[0] / "final.json").read_text()
    (folders[0] / "final.json").write_text(text[: len(text) // 2])
    (folders[1] / "config.json").unlink()
    edit(folders[2] / "final.json", id="another")
    (folders[3] / "config.json").write_text("[]")
    content = json.loads((folders[4] / "final.json").read_text())
    del content["test"]
    write(folders[4] / "final.json", content)
    (tmp_path / "s" / "empty").mkdir()
    write_trial(
        tmp_path / "s" / "stranger",
        Run.from_dict({"data": {"name": "digits"}, "model": {"name": "vit"}}),
        0,
        1,
        0,
    )
    report = make_report([tmp_path])
    reasons = {s.path.split("/")[-1]: s.reason for s in report.skipped}
    assert "damaged" in reasons[ids[0]]
    assert "final.json" in reasons[ids[0]]
    assert "no config.json" in reasons[ids[1]]
    assert "belongs to trial another" in reasons[ids[2]]
    assert "damaged" in reasons[ids[3]]
    assert "final.json has no test" in reasons[ids[4]]
    assert reasons["empty"] == "empty folder"
    assert "no configuration in plan.json" in reasons["stranger"]
    assert not any(str(tmp_path) in s.reason for s in report.skipped)  # pages are passed on
    (table,) = report.tables
    assert sum(e.summary.n for e in table.entries) == 25
    assert "5 of 30 planned runs not finished." in advise(table).trust.details


def test_a_damaged_plan_is_listed_and_its_trials_still_make_a_table(tmp_path):
    write_study(tmp_path / "s")
    (tmp_path / "s" / "plan.json").write_text('{"rows": [')
    report = make_report([tmp_path / "s"])
    assert [s.path for s in report.skipped] == ["s/plan.json"]
    assert {"plain", "drop_key(rate=0.3)"} <= {e.name for e in report.tables[0].entries}


def test_nothing_to_report_says_what_was_found_and_what_to_do(tmp_path):
    with pytest.raises(LabError, match="There is no folder"):
        make_report([tmp_path / "nowhere"])
    (tmp_path / "a").mkdir()
    with pytest.raises(LabError, match=r"a: empty folder(.|\n)*dampen demo"):
        make_report([tmp_path])


def test_unfinished_and_diverged_runs_are_counted_and_not_averaged(tmp_path):
    plan = write_study(tmp_path)
    plain, dropkey = (
        tmp_path / plan.configs[i].settings[0].ids[seed] for i, seed in ((0, "0"), (1, "1"))
    )
    (plain / "final.json").unlink()
    edit(
        dropkey / "final.json",
        status="diverged",
        reason="Training stopped at step 3.",
        test={},
        valid={},
    )
    (table,) = make_report([tmp_path]).tables
    one, two = table.entries[:2]
    assert (one.summary.n, one.unfinished, one.diverged) == (4, 1, 0)
    assert (two.summary.n, two.unfinished, two.diverged) == (4, 0, 1)
    assert two.comparison.n == 3  # seeds that both have
    assert "1 run diverged and is not in the means." in advise(table).trust.details


def test_trials_in_a_shared_store_serve_two_plans(tmp_path):
    write_study(tmp_path / "a", name="a")
    shutil.copytree(
        tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("[0-9a-f]*[0-9a-f]")
    )
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["plan.json"]
    report = make_report([tmp_path])
    assert [sum(e.summary.n for e in t.entries) for t in report.tables] == [30, 30]
    assert not report.skipped


def test_a_damaged_log_costs_its_curve_and_nothing_else(tmp_path):
    plan = write_study(tmp_path)
    trial = tmp_path / next(iter(plan.runs))
    (trial / "log.jsonl").write_text('{"epoch": 1, "step"\n')
    report = make_report([tmp_path])
    assert report.tables[0].entries[0].summary.n == 5
    assert f"Damaged and left out: the log of {trial.name}." in report.render("html")


# one protocol per table


def test_mixing_protocols_is_refused_with_every_difference(tmp_path):
    loose(tmp_path, limit=3000)
    loose(tmp_path, limit=5000, methods=[{"name": "drop_key", "rate": 0.3}], epochs=7)
    with pytest.raises(ProtocolMismatch) as caught:
        make_report([tmp_path])
    assert caught.value.exit_code == 2
    assert "data.limit: 3000 in 3 runs, 5000 in 3 runs" in str(caught.value)
    assert "train.epochs: 20 in 3 runs, 7 in 3 runs" in str(caught.value)
    assert "--split" in str(caught.value)
    assert len(make_report([tmp_path], split=True).tables) == 2


def test_learning_rates_and_seeds_may_differ(tmp_path):
    loose(tmp_path, lr=1e-3)
    loose(tmp_path, lr=5e-3)
    (table,) = make_report([tmp_path]).tables
    assert len(table.entries) == 1
    assert sorted(c.grid["train.lr"] for c in table.entries[0].config.settings) == [0.001, 0.005]


def test_a_plan_that_mixes_data_is_refused(tmp_path):
    plan = write_study(tmp_path)
    other = tmp_path / next(iter(plan.configs[1].settings[0].ids.values()))
    edit(other / "config.json", data={"name": "cifar100", "limit": 3000})
    with pytest.raises(
        ProtocolMismatch, match=r"data\.name: cifar10 in 29 runs, cifar100 in 1 run\n"
    ):
        make_report([tmp_path])


def test_splits_of_another_size_are_another_protocol(tmp_path):
    plan = write_study(tmp_path)
    other = tmp_path / next(iter(plan.configs[1].settings[0].ids.values()))
    edit(other / "final.json", data={"examples": {"train": 50, "valid": 900, "test": 1000}})
    with pytest.raises(ProtocolMismatch, match=r"examples\.train: 2100 in 29 runs, 50 in 1 run"):
        make_report([tmp_path])


def test_rows_with_another_model_are_compared_among_themselves(tmp_path):
    plan = write_study(tmp_path)
    for row in plan.configs[3:]:
        for trial in row.settings[0].ids.values():
            edit(tmp_path / trial / "config.json", model={"name": "convmixer"})
    (table,) = make_report([tmp_path]).tables
    assert [e.reference for e in table.entries] == [
        None,
        "plain",
        "plain",
        None,
        "Explicit v",
        "Explicit v",
    ]


def test_rows_of_a_plan_may_differ_in_their_pretraining_and_older_runs_know_none(tmp_path):
    plan = write_study(tmp_path)
    first, second, *_ = plan.configs
    for trial in first.settings[0].ids.values():
        edit(tmp_path / trial / "config.json", pretrain={"train": {"epochs": 4}})
    one = next(iter(second.settings[0].ids.values()))
    edit(
        tmp_path / one / "config.json", pretrain=None
    )  # as a newer version writes it, beside runs of an older one
    (table,) = make_report([tmp_path]).tables
    assert len(table.entries) == len(plan.configs)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(
        ProtocolMismatch, match=r"pretrain\.train\.epochs: not set in 25 runs, 4 in 5 runs"
    ):
        make_report([tmp_path])


def test_packed_records_give_the_same_report_as_the_folders(tmp_path):
    plan = write_study(tmp_path / "s")
    (tmp_path / "s" / next(iter(plan.runs)) / "weights-1.pt").write_bytes(b"large")
    write(tmp_path / "s" / list(plan.runs)[1] / "diagnose.json", {"version": 1})
    damaged = tmp_path / "s" / list(plan.runs)[2] / "final.json"
    damaged.write_text(damaged.read_text()[:20])
    packed = tmp_path / "s.json"
    write_report([tmp_path / "s"], packed, "pack")
    assert b"large" not in packed.read_bytes()
    again, before = make_report([packed]), make_report([tmp_path / "s"])
    assert len(again.skipped) == 1
    for format in ("md", "csv", "latex"):
        assert again.render(format).replace(
            "s/" + damaged.parent.name, damaged.parent.name
        ) == before.render(format)
    assert again.tables[0].study.runs()[0].lines() == before.tables[0].study.runs()[0].lines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "damaged"),
        ("[]", "is not a pack"),
        ('{"kind": "dampen records", "version": 9, "folders": {}}', "version 9"),
        ('{"kind": "dampen records", "version": 1, "folders": {"../x": {}}}', "does not belong"),
        (
            '{"kind": "dampen records", "version": 1, "folders": {"x": {"run.sh": ""}}}',
            "run.sh. does not belong",
        ),
    ],
)
def test_a_file_that_holds_no_records_is_refused(tmp_path, text, said):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(LabError, match=said):
        make_report([tmp_path / "p.json"])
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_two_folders_of_one_name_stay_apart(tmp_path):
    for day in ("monday", "tuesday"):
        write_study(tmp_path / day / "digits")
    folders = [tmp_path / day / "digits" for day in ("monday", "tuesday")]
    write_report(folders, tmp_path / "p.json", "pack")
    assert len(make_report([tmp_path / "p.json"]).tables) == len(make_report(folders).tables) == 2


def test_damaged_costs_and_odd_results_are_listed(tmp_path):
    plan = write_study(tmp_path / "s")
    edit(tmp_path / "s" / next(iter(plan.runs)) / "final.json", primary=4)
    (tmp_path / "bench.json").write_text('{"kind": "dampen bench"}')
    report = make_report([tmp_path / "s", tmp_path / "bench.json"])
    reasons = [s.reason for s in report.skipped]
    assert any("final.json is not what was expected" in r and "primary" in r for r in reasons)
    assert any("a bench result without machine, ratios" in r for r in reasons)


def test_new_results_say_their_format_and_older_ones_load(tmp_path, small, quick):
    from dampen.studies.result import FORMAT, parse_result
    from dampen.studies.trainer.train import run_trial

    result = run_trial(small(epochs=1), tmp_path / "t", quick)
    assert parse_result(result).format == FORMAT
    older = {k: v for k, v in result.items() if k not in ("format", "malloc", "threads")}
    assert parse_result(older).format == 0
    assert parse_result(older | {"a field of later": 1}).test == parse_result(result).test
