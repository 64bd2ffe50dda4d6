"""Records that were damaged: noticed, named, repaired where a checkpoint can, and never in the way of others."""

import json
import shutil

import pytest

from dampen.studies.comparison import Comparison, load_comparison, make_comparison, rebuild_plan
from dampen.studies.engines.runner import run_comparison
from dampen.studies.errors import DamagedRecord, Interrupted, LabError
from dampen.studies.files import CHECKSUM, sealed, unsealed
from dampen.studies.report import make_report
from dampen.studies.report.packs import pack, to_text
from dampen.studies.report.read import collect
from dampen.studies.request import comparison
from dampen.studies.store import RunStore
from dampen.studies.table import read_results
from dampen.studies.trainer.checkpoint import load_state, save_state, saved_states
from dampen.studies.trainer.train import run_trial
from tests.studies.interrupted import interrupt_at, log_without_times, same
from tests.studies.synthetic_runs import write_study


def cut_at(trial, folder, execution, step):
    report, stop = interrupt_at({step})
    with pytest.raises(Interrupted):
        run_trial(trial, folder, execution, report, stop)


def resume(trial, folder, execution):
    events = []
    result = run_trial(trial, folder, execution, events.append)
    return result, [e["message"] for e in events if e["kind"] == "warning"]


def lose_a_line(text):
    return "".join(text.splitlines(keepends=True)[1:])


def flip_a_digit(text):
    return text.replace('"epoch": 2', '"epoch": 3')


def break_json(text):
    return text.replace(":", ";", 1)


@pytest.mark.parametrize("harm", [lose_a_line, flip_a_digit, break_json, lambda text: ""])
def test_a_damaged_log_is_noticed_on_resume_and_repaired(tmp_path, small, quick, harm):
    trial = small(epochs=3)
    whole = run_trial(trial, tmp_path / "whole", quick)
    cut_at(trial, tmp_path / "cut", quick, 14)  # in the third epoch, so two lines are there
    log = tmp_path / "cut" / "log.jsonl"
    assert len(RunStore(tmp_path / "cut").lines()) == 2
    log.write_text(harm(log.read_text()))
    result, warnings = resume(trial, tmp_path / "cut", quick)
    assert len(warnings) == 1
    assert "log.jsonl" in warnings[0]
    assert "repaired from the checkpoint" in warnings[0]
    assert same(result, whole)
    assert log_without_times(tmp_path / "cut") == log_without_times(tmp_path / "whole")


def test_checkpoints_of_before_say_that_lines_are_lost(tmp_path, small, quick):
    trial = small(epochs=3)
    cut_at(trial, tmp_path, quick, 14)
    (path,) = saved_states(tmp_path, "checkpoint")
    state = {
        k: v for k, v in load_state(path).items() if k not in ("log", "data", "threads", "resumed")
    }
    path.unlink()
    save_state(tmp_path, "checkpoint", 14, state)
    log = tmp_path / "log.jsonl"
    log.write_text(lose_a_line(log.read_text()))
    result, (warning,) = resume(trial, tmp_path, quick)
    assert "1 of 2 are there, and the checkpoint does not have them" in warning
    assert result["status"] == "finished"


@pytest.mark.parametrize("name", ["environment.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "null", '{"sessions": 3}', "\x00" * 50])
def test_a_damaged_companion_does_not_block_an_intact_checkpoint(
    tmp_path, small, quick, name, content
):
    trial = small(epochs=2)
    cut_at(trial, tmp_path, quick, 8)
    (tmp_path / name).write_text(content)
    result, _ = resume(trial, tmp_path, quick)
    assert result["resumed"] == 1
    assert (
        tmp_path / f"{name.split('.')[0]}.damaged.json"
    ).read_text() == content  # nothing is thrown away
    assert RunStore(tmp_path).trial() == trial
    assert RunStore(tmp_path).sessions()[-1]["threads"] == 1


def test_a_changed_result_is_noticed(tmp_path, small, quick):
    result = run_trial(small(epochs=1), tmp_path, quick)
    path = tmp_path / "final.json"
    content = json.loads(path.read_text())
    assert content.pop(CHECKSUM)
    assert content == result == RunStore(tmp_path).final()
    changed = json.loads(path.read_text())
    changed["test"]["accuracy"] = 0.999
    path.write_text(json.dumps(changed))
    with pytest.raises(DamagedRecord, match=r"final\.json was changed.*Delete this file"):
        RunStore(tmp_path).final()
    path.write_text(json.dumps(content))  # as older versions wrote it
    assert RunStore(tmp_path).final() == result
    log = tmp_path / "log.jsonl"
    log.write_text("")
    with pytest.raises(DamagedRecord, match=r"log\.jsonl is damaged: it has 0 lines, .* after 1"):
        RunStore(tmp_path).lines()


def test_a_flipped_byte_in_the_log_names_the_file_and_the_line(tmp_path):
    record = RunStore(tmp_path)
    for epoch in range(3):
        record.log({"epoch": epoch, "valid": {"accuracy": 0.25}})
    path = tmp_path / "log.jsonl"
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        try:
            lines = record.lines()
        except DamagedRecord as error:
            number = whole[:place].count(b"\n") + 1
            assert f"Line {number} of {path} " in str(error)  # noqa: PT017
        else:  # only the end of a line can pass: the last one then counts as torn
            assert place == len(whole) - 1
            assert [line["epoch"] for line in lines] == [0, 1]


def test_lines_without_checksums_are_read(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    assert RunStore(tmp_path).lines() == [{"epoch": 0}, {"epoch": 1}]
    assert unsealed({"a": 1}, "x", "y") == {"a": 1}
    assert unsealed(sealed({"a": 1}), "x", "y") == {"a": 1}


@pytest.fixture
def copy(study, tmp_path):
    shutil.copytree(study, tmp_path / "one")
    return tmp_path / "one"


@pytest.mark.parametrize("content", ["{", "[]", '{"rows": 3}', ""])
def test_a_damaged_plan_is_rebuilt_from_its_trials(copy, content):
    before = Comparison.load(copy)
    (copy / "plan.json").write_text(content)
    plan = load_comparison(copy)
    recorded = {i for i in before.runs if (copy / i / "config.json").exists()}
    assert set(plan.runs) == recorded
    assert "made again from the trials" in plan.departures[0]
    report = make_report([copy])
    assert any("plan.json" in s.path for s in collect([copy]).skipped)
    text = report.render("md")
    assert "made again from the trials" in text


def test_a_plan_without_trials_cannot_be_rebuilt(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    assert not rebuild_plan(tmp_path).runs
    with pytest.raises(LabError, match="no trial lies beside it"):
        load_comparison(tmp_path)


def test_one_damaged_result_does_not_stop_the_others(tmp_path, quick):
    settings = [
        "data.limit=300",
        "train.epochs=1",
        "model.width=16",
        "model.depth=1",
        "model.heads=2",
        "model.mlp=16",
    ]
    plan = make_comparison(comparison("digits", None, "drop_key", 1), settings=settings)
    first, second = plan.chosen()
    run_trial(first, tmp_path / first.id, quick)
    path = tmp_path / first.id / "final.json"
    path.write_text(path.read_text().replace('"status": "finished"', '"status": "finnished"'))
    run = run_comparison(plan, tmp_path, [first, second], quick, workers=1)
    assert run.counts() == {"failed": 1, "finished": 1}
    assert str(path) in run.messages()[0]
    assert list(read_results(plan, tmp_path)) == [second.id]
    path.unlink()  # as the message says
    assert run_comparison(plan, tmp_path, [first, second], quick, workers=1).exit_code == 0


def test_a_changed_pack_is_noticed(tmp_path):
    write_study(tmp_path / "one")
    packed = pack([tmp_path / "one"])
    file = tmp_path / "records.json"
    file.write_text(to_text(packed))
    assert collect([file]).runs
    old = {k: v for k, v in packed.items() if k != "checksums"}
    file.write_text(to_text(old))
    assert collect([file]).runs  # packs of before
    text = to_text(packed)
    name = next(n for n, files in packed["folders"].items() if "final.json" in files)
    value = packed["folders"][name]["final.json"]["test"]
    key = next(iter(value))
    file.write_text(text.replace(json.dumps(value[key]), json.dumps(value[key] + 0.001)))
    with pytest.raises(DamagedRecord, match=r"records\.json was changed"):
        collect([file])
    lost = {**packed, "folders": {n: f for n, f in packed["folders"].items() if n != name}}
    file.write_text(to_text(lost))
    with pytest.raises(DamagedRecord, match=name):
        collect([file])
