"""Loggers are told what is recorded; the record stays the truth."""

import json
import re
import struct
import sys
import time
from dataclasses import replace

import pytest

from dampen import extensions
from dampen.studies.errors import ConfigError
from dampen.studies.report.terminal import LiveView
from dampen.studies.store import RunStore
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from tests.studies.study.conftest import ask, run, script  # noqa: F401


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path, small, quick, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trial = small(epochs=2)
    result = run_trial(trial, tmp_path / "t", replace(quick, loggers=("wandb",)))
    assert result["status"] == "finished"
    (file,) = (tmp_path / "t").rglob("*.wandb")
    told = _scalars(file)
    until = time.monotonic() + 20
    while "valid/accuracy" not in told and time.monotonic() < until:  # wandb's service still writes
        time.sleep(0.2)
        told = _scalars(file)
    lines = RunStore(tmp_path / "t").lines()
    for group, name in (
        ("valid", "accuracy"),
        ("train", "task"),
    ):  # each once as history, once as the run's summary
        values = [line[group][name] for line in lines]
        assert list(dict.fromkeys(told[f"{group}/{name}"])) == list(dict.fromkeys(values))


def _scalars(file):
    """The history of an offline run, by name."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            found.setdefault(name, []).append(json.loads(item.value_json))
    return found


def _records(content, header=7, block=32768):
    """The records of a log in LevelDB's format: a record that crosses a block comes in pieces."""
    position, pieces = header, []
    while position + header <= len(content):
        left = block - position % block
        if left < header:  # the end of a block that is too short for another piece
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + header])
        pieces.append(content[position + header : position + header + length])
        position += header + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield b"".join(pieces)
            pieces = []


def test_tensorboard_of_ones_own_training(ask, run):  # noqa: F811
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    asked = ask(seeds=1)
    run(asked, tensorboard=True)
    trial = asked.plan.configs[1].settings[0].ids["0"]
    board = EventAccumulator(str(asked.folder / trial / "tensorboard"))
    board.Reload()
    lines = RunStore(asked.folder / trial).lines()
    values = [e.value for e in board.Scalars("valid/accuracy")]
    assert values == pytest.approx([line["valid"]["accuracy"] for line in lines])


def test_a_logger_of_another_package(tmp_path, small, quick, monkeypatch):
    told = []

    class Mine:
        def __init__(self, folder, trial, step):
            told.append((trial.id, step))

        def log(self, step, values):
            told.append((step, sorted(values)))

        def finish(self, result):
            told.append(result["status"])

        def close(self):
            told.append("closed")

    monkeypatch.setitem(extensions._registered["dampen.loggers"], "mine", Mine)
    trial = small(epochs=1)
    run_trial(trial, tmp_path, replace(quick, loggers=("mine",)))
    assert told[0] == (trial.id, 0)
    assert "valid/accuracy" in told[1][1]
    assert told[2:] == ["finished", "closed"]


def test_an_unknown_logger_and_one_that_is_not_installed(monkeypatch, tmp_path, small, quick):
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        Execution(loggers=("wandbb",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'dampen\[wandb\]'"):
        run_trial(small(), tmp_path, replace(quick, loggers=("wandb",)))


def test_without_a_terminal_there_is_a_line_per_minute(monkeypatch, capsys):
    from rich.console import Console

    from dampen.studies.report import terminal
    from dampen.studies.result import Event

    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(width=200, force_terminal=False)
    with LiveView(
        console, {"a": "plain seed 0", "b": "drop_key seed 0", "c": "plain seed 1"}
    ) as view:
        for trial in ("a", "b"):
            view(trial, Event(kind="start", step=0, steps=10, resumed=0))
        now[0] += 30
        view("a", Event(kind="outcome", status="finished", message=""))
        event = Event(
            kind="progress", step=3, steps=10, epoch=1, epochs=2, terms={"task": 0.51}, eta=9.0
        )
        view("b", event)
        assert "runs done" not in capsys.readouterr().out
        now[0] += 31
        view("b", event)
        view("b", event)
    told = capsys.readouterr().out
    assert told.count("runs done") == 1
    assert re.search(r"1/3 runs done, about .* left; drop_key seed 0: epoch 1/2 task 0\.51", told)
