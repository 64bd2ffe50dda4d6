"""Records and packs made by version 0.1, which lie in the repository, still load, and their trials keep their ids."""

from pathlib import Path

import pytest

from dampen.studies.comparison import Comparison
from dampen.studies.files import read_json
from dampen.studies.report import make_report
from dampen.studies.report.summary import noise, tuned
from dampen.studies.run import Run

PACKS = (
    "attentiondrop/cifar10",
    "dropkey/schedules_cifar10",
    "explicit_dropout/table_1",
    "explicit_dropout/table_5",
)
REPRODUCTIONS = Path(__file__).parents[3] / "reproductions"


def result_file(name: str) -> Path:
    """The committed result file GROUP/NAME."""
    group, file = name.split("/")
    return REPRODUCTIONS / group / "results" / file


@pytest.mark.parametrize("name", PACKS)
def test_ids_are_what_they_were(name):
    folders = read_json(result_file(f"{name}.json"))["folders"].values()
    configs = [files["config.json"] for files in folders if "config.json" in files]
    assert configs
    for config in configs:
        asked = {key: value for key, value in config.items() if key != "id"}
        assert Run.from_stored(asked).id == config["id"]


@pytest.mark.parametrize(
    ("name", "split"),
    [("attentiondrop/digits-study", "the same split"), ("finetuning/banking77", None)],
)
def test_records_of_format_1_mean_what_they_meant(name, split):
    """No split_seed is the one fixed split, its search is that of one seed, and its trials keep their ids."""
    (table,) = make_report([result_file(f"{name}.json.xz")]).tables
    runs = [run for entry in table.entries for run in entry.setting.logged.values()]
    assert runs
    for run in runs:
        trial = Run.from_stored({k: v for k, v in run.config.items() if k != "id"})
        assert trial.id == run.id
        assert trial.format == 1
        assert trial.data == run.config["data"]
        assert "test_seed" not in trial.data
    if split is not None:
        assert split in noise(table)[0]
        assert all("split_seed" not in run.config["data"] for run in runs)
        assert tuned(table).startswith("Settings were tuned: ")


def test_a_plan_of_format_1_loads_and_plans_no_other_trials(tmp_path):
    from dampen.studies.report.read import collect

    path = result_file("attentiondrop/digits-study.json.xz")
    (plan,) = collect([path]).plans.values()
    assert all(id == trial.id for id, trial in plan.runs.items())
    assert {t.format for t in plan.runs.values()} == {1}
    plan.save(tmp_path)
    assert Comparison.load(tmp_path) == plan


def test_a_pack_is_read_whole():
    path = result_file("attentiondrop/cifar10.json")
    folders = read_json(path)["folders"].values()
    report = make_report([path])
    runs = [run for entry in report.tables[0].entries for run in entry.setting.finished().values()]
    assert len(runs) == sum("final.json" in files for files in folders) > 0
    assert all(run.measured for run in runs)  # each was diagnosed
    assert not report.skipped
