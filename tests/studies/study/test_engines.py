"""The same study of one's own training on Ray, from the command line, and tuned."""

import json

import pytest

import dampen
from dampen.cli import main
from dampen.studies.errors import ConfigError


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_the_same_study_on_ray_has_the_same_results(script, tmp_path):
    options = {
        "methods": ["drop_key(rate=0.2)", "drop_head", "drop_path"],
        "seeds": 1,
        "params": {"epochs": 1},
    }
    options |= {"progress": False, "threads": 1}
    here = dampen.compare(f"{script}:train", folder=tmp_path / "local", workers=1, **options)
    there = dampen.compare(
        f"{script}:train", folder=tmp_path / "ray", engine="ray", workers=2, **options
    )
    assert {r.name: r.values for r in here.rows} == {r.name: r.values for r in there.rows}
    assert set(here.plan.runs) == set(there.plan.runs)


@pytest.mark.slow
def test_the_command_compares_a_function_and_prints_json(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        rows = [
            "--methods",
            "drop_key, drop_head, params(lr=0.01)",
            "--seeds",
            "1",
            "--set",
            "epochs=1",
        ]
        where = ["--out", str(tmp_path / "runs"), "--workers", "1", "--threads", "1", "--json"]
        main(["compare", f"{script}:train", *rows, *where])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metric"] == "accuracy"
    assert [row["name"] for row in told["rows"]] == [
        "plain",
        "drop_key",
        "drop_head",
        "params(lr=0.01)",
    ]
    assert told["trials"] == {"finished": 4}


@pytest.mark.slow
def test_a_search_over_strengths_and_the_learning_rate(script, tmp_path, capsys):
    command = [
        "compare",
        f"{script}:train",
        "--methods",
        "drop_key",
        "--seeds",
        "1",
        "--set",
        "epochs=1",
    ]
    command += [
        "--set",
        "lr=0.001",
        "--out",
        str(tmp_path),
        "--workers",
        "1",
        "--threads",
        "1",
        "--json",
    ]
    command += ["--tune", "3"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert "pass the validation metric" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([*command, "--metric", "accuracy"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out)
    keys = {row["name"]: set(row["grid"]) for row in told["rows"]}
    assert keys == {
        "plain": {"function.params.lr"},
        "drop_key": {"function.params.lr", "drop_key_rate"},
    }


def test_own_training_brings_its_own_data(script, capsys):
    with pytest.raises(SystemExit) as end:
        main(["compare", f"{script}:train", "--data", "digits"])
    assert end.value.code == 2
    assert "a training function brings its own" in capsys.readouterr().err


def test_a_metric_that_is_not_returned_is_told(ask, run):
    from dampen.studies.errors import LabError

    with pytest.raises(
        LabError, match="judged by 'f1', but train.py:train returned only accuracy, nll"
    ):
        run(ask(metric="f1", seeds=1))
    with pytest.raises(ConfigError):
        ask(metric="f1:up")


@pytest.mark.slow
def test_the_threads_of_the_environment_and_those_that_are_said_are_obeyed(
    script, tmp_path, monkeypatch
):
    """What torch used, as the function itself saw it."""
    text = script.read_text().replace(
        '"nll": loss.item()}', '"nll": loss.item(), "threads": torch.get_num_threads()}'
    )
    script.write_text(text)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    options = {
        "params": {"epochs": 1},
        "workers": 1,
        "progress": False,
        "folder": tmp_path / "study",
    }
    study = dampen.compare(f"{script}:train", methods="drop_key", seeds=1, **options)
    study.add(seeds=1, threads=2)
    assert {tuple(row.by_seed["threads"].values()) for row in study.rows} == {(3.0, 2.0)}
