"""Records and packs made by version 0.1, which lie in the repository, still load, and their trials keep their ids."""

from pathlib import Path

import pytest

from dampen.lab.config.trial import TrialSpec
from dampen.lab.files import read_json
from dampen.lab.report import make_report

PACKS = ("attentiondrop/cifar10", "dropkey/schedules_cifar10", "explicit_dropout/table_1", "explicit_dropout/table_5")
RECORDS = Path(__file__).parents[3] / "records"


@pytest.mark.parametrize("name", PACKS)
def test_ids_are_what_they_were(name):
    folders = read_json(RECORDS / f"{name}.json")["folders"].values()
    configs = [files["config.json"] for files in folders if "config.json" in files]
    assert configs
    for config in configs:
        asked = {key: value for key, value in config.items() if key != "id"}
        assert TrialSpec.from_stored(asked).id == config["id"]


def test_a_pack_is_read_whole():
    path = RECORDS / "attentiondrop" / "cifar10.json"
    folders = read_json(path)["folders"].values()
    report = make_report([path])
    runs = [run for entry in report.tables[0].entries for run in entry.cell.finished().values()]
    assert len(runs) == sum("final.json" in files for files in folders) > 0
    assert all(run.measured for run in runs)  # each was diagnosed
    assert not report.skipped
