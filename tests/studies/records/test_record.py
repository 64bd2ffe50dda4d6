import errno
import json
import os
import signal
import stat
import time
import warnings

import pytest
import torch

from dampen.studies.errors import DiskFull, LabError, Locked
from dampen.studies.files import atomic_file, write_json
from dampen.studies.processes import start
from dampen.studies.store import RunStore, clean_folder, locked
from dampen.studies.trainer.checkpoint import (
    load_newest,
    load_state,
    save_state,
    save_weights,
    saved_states,
)


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    with atomic_file(path) as file:
        file.write(b"old")

    def fail():
        with atomic_file(path) as file:
            file.write(b"new and longer")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old"


def test_a_full_disk_is_said_in_words_and_keeps_what_was_there(tmp_path):
    write_json(tmp_path / "final.json", {"x": 1})
    with (
        pytest.raises(DiskFull, match=r"No space left.*final\.json.*resumes"),
        atomic_file(tmp_path / "final.json"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert json.loads((tmp_path / "final.json").read_text()) == {"x": 1}
    with pytest.raises(PermissionError), atomic_file(tmp_path / "final.json"):
        raise PermissionError(errno.EACCES, "other errors stay what they are")


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".final.json.123.tmp").write_text("{")
    (tmp_path / "final.json").write_text("{}")
    clean_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["final.json"]


def _hold(pipe, folder):
    with locked(folder):
        pipe.send("ready")
        time.sleep(60)


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path):
    holder, pipe = start(_hold, tmp_path)
    assert pipe.recv() == "ready"
    with pytest.raises(Locked, match=f"in use by process {holder.pid}"), locked(tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (tmp_path / "lock.holder").exists()  # stale: nobody removed it
    with locked(tmp_path), pytest.raises(Locked, match=f"process {os.getpid()}"), locked(tmp_path):
        pass
    assert not (tmp_path / "lock.holder").exists()


def test_the_log_survives_a_torn_line_and_can_be_cut_back(tmp_path):
    record = RunStore(tmp_path)
    for epoch in range(3):
        record.log({"epoch": epoch})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"epoch": 3, "val')
    assert [line["epoch"] for line in record.lines()] == [0, 1, 2]
    record.keep_lines(2)
    record.log({"epoch": 2, "again": True})
    assert record.lines() == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2, "again": True}]


def test_a_folder_belongs_to_one_trial(tmp_path, small):
    RunStore(tmp_path).start(small(), {"threads": 1})
    RunStore(tmp_path).start(small(), {"threads": 1})
    assert len(RunStore(tmp_path).sessions()) == 2
    assert RunStore(tmp_path).trial() == small()
    with pytest.raises(LabError, match="holds trial"):
        RunStore(tmp_path).start(small(lr=0.5), {"threads": 1})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LabError, match=r"config\.json is damaged"):
        RunStore(tmp_path).trial()


def test_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    for step in (1, 2, 10):
        save_state(tmp_path, "checkpoint", step, {"step": step})
    states = saved_states(tmp_path, "checkpoint")
    assert [load_state(p)["step"] for p in states] == [10, 2]
    data = bytearray(states[0].read_bytes())
    data[len(data) // 2] ^= 1  # one flipped bit
    states[0].write_bytes(data)
    state, damage = load_newest(tmp_path, "checkpoint")
    assert state == {"step": 2}
    assert len(damage) == 1
    assert "is damaged" in damage[0]
    states[1].write_bytes(states[1].read_bytes()[:100])  # cut off
    state, damage = load_newest(tmp_path, "checkpoint")
    assert state is None
    assert len(damage) == 2


def test_final_weights_are_read_back_with_their_step_and_only_the_newest_are_kept(tmp_path):
    for step in (3, 12):
        path = save_weights(tmp_path, "weights", step, {"w": torch.arange(3.0) + step})
    assert saved_states(tmp_path, "weights") == [path]
    state = load_state(path)
    assert state["step"] == 12
    assert state["model"]["w"].tolist() == [12, 13, 14]


def test_a_checkpoint_that_carries_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch /tmp/dampen-was-here",)

    path = save_state(tmp_path, "checkpoint", 1, {"x": Evil()})
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_state(path)


def test_reopening_forgets_what_diverged_and_nothing_else(tmp_path):
    for name, status in {"a": "finished", "b": "diverged"}.items():
        RunStore(tmp_path / name).finish({"id": "x", "status": status})
    RunStore(tmp_path / "b" / "pretrain").finish({"id": "y", "status": "diverged"})
    RunStore(tmp_path / "a" / "pretrain").finish({"id": "y", "status": "diverged"})
    for name in ("a", "b", "never begun"):
        RunStore(tmp_path / name).reopen()
    assert RunStore(tmp_path / "a").final() == {"id": "x", "status": "finished"}
    assert RunStore(tmp_path / "b").final() is None
    assert not list(
        tmp_path.glob("*/pretrain/final.json")
    )  # it runs again with the training that it began


@pytest.mark.parametrize("torn", ["", "{", '{"epoch": 2, "valid": {"accuracy": 0.25}}'])
def test_a_torn_last_line_is_left_out_wherever_it_was_torn(tmp_path, torn):
    record = RunStore(tmp_path)
    for epoch in range(2):
        record.log({"epoch": epoch})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(torn)
    assert [line["epoch"] for line in record.lines()] == [0, 1]


def test_there_is_a_result_or_not(tmp_path):
    assert RunStore(tmp_path).done is False
    RunStore(tmp_path).finish({"id": "x", "status": "finished"})
    assert RunStore(tmp_path).done is True


def test_folders_with_spaces_and_letters_of_other_languages(tmp_path, small, quick):
    from dampen.studies.report import make_report
    from dampen.studies.trainer.train import run_trial

    folder = tmp_path / "Läufe mit Platz" / "试 验 'a' %s"
    result = run_trial(small(epochs=1), folder, quick)
    assert RunStore(folder).final() == result
    assert run_trial(small(epochs=1), folder, quick) == result  # found again, not trained again
    (table,) = make_report([folder.parent]).tables
    assert [entry.summary.n for entry in table.entries] == [1]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_in_words(tmp_path, monkeypatch, code):
    def flock(fd, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(LabError, match="has no file locks"), locked(tmp_path / "run"):
        raise AssertionError("it is not held")


def test_where_flock_is_missing_a_lock_file_holds_the_folder(tmp_path, monkeypatch):
    """filelock's own way out, which warns."""

    def flock(fd, operation):
        raise OSError(errno.ENOSYS, "no flock")

    monkeypatch.setattr("fcntl.flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with locked(tmp_path / "run"), pytest.raises(Locked), locked(tmp_path / "run"):
            raise AssertionError("held twice")
        with locked(tmp_path / "run"):
            pass
