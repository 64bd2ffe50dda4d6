"""User functions that do what nobody should: nothing reaches the next run, each failure is named."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import dampen
from dampen.studies.errors import LabError, OwnCodeError
from dampen.studies.files import sealed
from dampen.studies.report import make_report, write_report
from dampen.studies.result import parse_lines
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import (
    check_readable,
    load_newest,
    load_state,
    save_state,
    saved_states,
)

HEAD = """
import dampen


def train(trial):
    reg = trial.regularize(dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2))
"""


def function(tmp_path, body):
    """A file with a training function whose body begins with a regularized model."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "hostile.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    return f"{path}:train"


def compare(tmp_path, body, **options):
    options = {
        "methods": "drop_key",
        "seeds": 1,
        "workers": 1,
        "threads": 1,
        "progress": False,
    } | options
    return dampen.compare(function(tmp_path, body), folder=tmp_path / "study", **options)


# --- nothing reaches the next run

CHANGES = """
import json, os, sys, warnings, torch
state = {
    "autocast": torch.is_autocast_enabled("cpu"), "threads": torch.get_num_threads(), "cwd": os.getcwd(),
    "deterministic": torch.are_deterministic_algorithms_enabled(), "dtype": str(torch.get_default_dtype()),
    "matmul": torch.get_float32_matmul_precision(), "patched": hasattr(torch, "left_behind"),
    "device": str(torch.get_default_device()), "variable": os.environ.get("LEFT_BEHIND"),
    "grad": torch.is_grad_enabled(), "filters": len(warnings.filters), "path": "left_behind" in sys.path,
}
(trial.folder / "state.json").write_text(json.dumps(state))
torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
torch.set_num_threads(2)
torch.use_deterministic_algorithms(True)
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.set_default_device("meta")
torch.left_behind = True
torch.set_grad_enabled(False)
os.environ["LEFT_BEHIND"] = "1"
sys.path.append("left_behind")
warnings.simplefilter("ignore")
os.chdir("/")
return {"nll": 1.0}
"""


@pytest.mark.slow
def test_no_run_finds_what_another_changed_in_its_process(tmp_path):
    study = compare(tmp_path, CHANGES, seeds=2)
    found = [
        json.loads(path.read_text()) for path in sorted(Path(study.folder).glob("*/state.json"))
    ]
    assert len(found) == 4
    assert all(state == found[0] for state in found)
    assert not found[0]["autocast"]
    assert not found[0]["patched"]
    assert found[0]["variable"] is None


# --- checkpoints


class Thing:
    """An object of the user's."""


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"epoch": 1, "file": Path("a")}, r"state\['file'\] is a \w*Path"),
        ({"a": [1, {"deep": Thing()}]}, r"state\['a'\]\[1\]\['deep'\] is a Thing"),
        ({"counts": defaultdict(Thing)}, r"state\['counts'\] is a defaultdict"),
        ({"f": lambda: 0}, r"state\['f'\] is a function"),
        (np.array([Thing()]), "state is a ndarray"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_refused_where_it_is(state, place):
    with pytest.raises(TypeError, match=place):
        check_readable(state, "state")


def test_numpy_numbers_and_arrays_come_back_as_they_were(tmp_path):
    given = {
        "best": np.float64(0.5),
        "seen": np.arange(3, dtype=np.int16),
        "flag": np.bool_(True),
        "x": torch.ones(2),
    }
    given |= {"empty": np.zeros((0, 2), np.float32), "none": None, "order": ((1, 2), {"a": 1.5})}
    check_readable(given, "state")
    save_state(tmp_path, "checkpoint", 1, given)
    found, damage = load_newest(tmp_path, "checkpoint")
    assert damage == []
    for name, value in given.items():
        assert type(found[name]) is type(value)
        same = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
        assert same(found[name], value) if name != "order" else found[name] == value


def test_an_unreadable_checkpoint_of_an_older_version_is_reported_as_damaged(tmp_path):
    save_state(tmp_path, "checkpoint", 1, {"step": 1})
    save_state(tmp_path, "checkpoint", 2, {"path": Path("a")})
    state, (damage,) = load_newest(tmp_path, "checkpoint")
    assert state == {"step": 1}
    assert "cannot be read" in damage
    with pytest.raises(ValueError, match="cannot be read"):
        load_state(saved_states(tmp_path, "checkpoint")[0])


@pytest.mark.slow
def test_a_refused_checkpoint_names_the_line_of_the_function(tmp_path):
    with pytest.raises(
        LabError, match=r"hostile\.py, line 8, in train: TypeError: .*state\['at'\]"
    ):
        compare(
            tmp_path,
            "from pathlib import Path\ntrial.checkpoint({'at': Path('x')})\nreturn {'nll': 1.0}",
        )


# --- the log


@pytest.mark.parametrize("name", ["seconds", "checksum"])
def test_names_that_dampen_writes_into_the_log_are_refused(script, ask, run, name):
    script.write_text(script.read_text().replace("trial.log(epoch", f"trial.log({name}=1.0, epoch"))
    with pytest.raises(
        OwnCodeError, match=rf"train\.py, line \d+, in train: TypeError: trial\.log\({name}=...\)"
    ):
        run(ask(seeds=1))


def test_a_number_in_place_of_a_group_is_refused_and_a_group_as_lr_is_kept(script, ask, run):
    text = script.read_text()
    script.write_text(text.replace("train=terms", "train=0.5"))
    with pytest.raises(
        OwnCodeError, match=r"trial\.log\(train=...\) must be a dict of numbers, got 0\.5"
    ):
        run(ask(seeds=1))
    script.write_text(text.replace("train=terms", "train=terms, lr={'head': 0.1}"))
    asked = ask(seeds=1, methods="drop_head", folder=script.parent / "again")
    run(asked)
    lines = [
        parse_lines(RunStore(path.parent).lines()) for path in asked.folder.glob("*/final.json")
    ]
    assert [found[0].lr for found in lines] == [{"head": 0.1}] * 2


# --- BaseExceptions


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        "asyncio.CancelledError()",
        "KeyboardInterrupt()",
        "GeneratorExit()",
        "SystemExit(3)",
        "BaseException('mine')",
    ],
)
def test_any_exception_is_reported_once_with_its_line(tmp_path, capfd, error):
    with pytest.raises(
        LabError, match=r"hostile\.py, line 8, in train: .*" + error.split("(")[0].split(".")[-1]
    ):
        compare(tmp_path, f"import asyncio\nraise {error}")
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "worker died" not in said


# --- huge numbers


@pytest.mark.slow
@pytest.mark.parametrize("huge", [1e160, -1.7e308])
def test_a_huge_metric_is_a_diverged_run(tmp_path, huge):
    body = f"return {{'perplexity': {huge} if trial.row != 'plain' and trial.seed == 0 else 20.0 + trial.seed}}"
    study = compare(tmp_path, body, seeds=3)
    assert {row.name: row.summary.n for row in study.rows} == {"plain": 3, "drop_key": 2}
    write_report([study.folder], tmp_path / "report.html")
    finals = [json.loads(path.read_text()) for path in Path(study.folder).glob("*/final.json")]
    (reason,) = [final["reason"] for final in finals if final["status"] == "diverged"]
    assert f"returned perplexity = {huge}" in reason


def test_a_recorded_study_with_a_huge_metric_can_be_read(script, ask, run, tmp_path):
    asked = ask(seeds=2)
    run(asked)
    path = sorted(asked.folder.glob("*/final.json"))[0]
    final = {k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}
    final["test"] = dict.fromkeys(final["test"], 1e160)
    final["train"] = {"task": 1e300}
    path.write_text(json.dumps(sealed(final)))  # as an older version wrote it
    report = make_report([asked.folder])
    (table,) = report.tables
    assert all(not math.isinf(entry.summary.mean) for entry in table.entries)
    write_report([asked.folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


# --- the same on Ray


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
def test_ray_keeps_runs_apart_and_names_what_failed(tmp_path):
    study = compare(tmp_path, CHANGES, seeds=2, engine="ray")
    found = [
        json.loads(path.read_text()) for path in sorted(Path(study.folder).glob("*/state.json"))
    ]
    assert len(found) == 4
    assert all(state == found[0] for state in found)
    with pytest.raises(LabError, match=r"hostile\.py, line 8, in train: .*CancelledError"):
        compare(
            tmp_path / "again",
            "import asyncio\nraise asyncio.CancelledError()",
            seeds=1,
            engine="ray",
        )
