"""The command: what it prints, what it writes, and its exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dampen
from dampen.cli import COMMANDS, RENAMED, available, main
from dampen.cli.run import NEXT
from tests.studies.user_files import write_images

TINY = """
title = "Tiny"
paper = ""
table = ""
cost = "seconds"
command = "dampen run tiny.toml"
departures = ["a toy"]
metric = "accuracy"
[base]
seeds = [0, 1]
data = { name = "digits", limit = 200, test_limit = 100 }
model = { name = "vit", patch_size = 4, width = 16, depth = 2, heads = 2, mlp = 32 }
train = { epochs = EPOCHS, batch_size = 32 }
[grid]
strength = [0.1, 0.3]
[scales.laptop]
[[rows]]
name = "plain"
baseline = true
[[rows]]
name = "drop key"
methods = [{ name = "drop_key", rate = "$strength" }]
published = { accuracy = [50.0, 1.0] }
"""


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


@pytest.fixture(autouse=True)
def _with_the_papers(monkeypatch):
    """The data sets and recipes of the papers come from a plug-in."""
    monkeypatch.setenv("DAMPEN_PLUGINS", "reproductions")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("EPOCHS", "1"))
    return path


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["list"], ["list", "recipes"], ["show", "drop_key"], ["run", "--help"]],
)
def test_what_only_informs_does_not_import_torch(arguments):
    code = f"import sys; from dampen.cli import main\ntry: main({arguments!r})\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


def test_help_lists_the_commands_that_exist_and_ends_in_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert set(available()) >= {"demo", "list", "show", "run", "compare", "data", "doctor"}
    for name in COMMANDS:
        assert (re.search(rf"\b{name}\b  ", out) is not None) == (name in available()), name
    assert "Exit codes" in out
    for name in available():
        arguments = [name, "list", "--help"] if name == "data" else [name, "--help"]
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert f"dampen {name}" in out.split("Examples:")[1], name


def test_version_and_no_arguments(capsys):
    assert run(capsys, "--version")[1].strip() == dampen.__version__
    assert "Usage" in "".join(map(str, run(capsys)))
    code, _, err = run(capsys, "lsit")
    assert code == 2
    assert "list" in err


def test_the_catalogue_says_what_the_classes_say(capsys):
    import inspect

    from dampen.registry import methods
    from dampen.regularizer import STAGES

    listed = {e["name"]: e for e in json.loads(run(capsys, "list", "--json")[1])}
    assert list(listed) == list(methods())
    for name, cls in methods().items():
        entry = listed[name]
        assert entry["stages"] == [s for s in STAGES if s in cls.stages], name
        assert list(entry["arguments"]) == list(inspect.signature(cls).parameters), name
        assert (entry["passes"], entry["in_eval"]) == (cls.passes, cls.in_eval), name
        assert entry["summary"], name


def test_show(capsys, monkeypatch):
    code, out, _ = run(capsys, "show", "DropKey")
    assert code == 0
    assert "2208.02646" in out
    assert re.search(r"Stages: .*\bmask\b", out)
    monkeypatch.setenv("DAMPEN_PLUGINS", "reproductions")
    code, out, _ = run(capsys, "show", "explicit_dropout/table_1")
    assert "86.38 ± 0.44" in out
    assert "Differences" in out
    code, out, err = run(capsys, "show", "drop_kye")
    assert (code, out) == (2, "")
    assert "did you mean 'drop_key'?" in err
    code, out, _ = run(capsys, "show", "drop_kye", "--json")
    assert code == json.loads(out)["exit_code"] == 2


@pytest.mark.slow
def test_run_trains_skips_what_is_done_and_selects_on_validation(capsys, tiny, tmp_path):
    out_dir = tmp_path / "runs"
    code, out, _ = run(capsys, "run", tiny, "--out", out_dir, "--json")
    assert code == 0
    first = json.loads(out)
    assert first["trials"] == {"finished": 6}  # plain x 2 seeds, drop key x 2 strengths x 2 seeds
    plain, dropped = first["rows"]
    assert plain["verdict"] == "reference"
    assert (dropped["verdict"], dropped["comparison"]["p"], dropped["n"]) == (
        "inconclusive",
        None,
        2,
    )
    assert dropped["cost"]["ratio"] > 0
    assert (plain["n"], dropped["n"]) == (2, 2)
    folder = out_dir / "tiny-laptop"
    assert str(folder) == first["folder"]
    finals = {p.parent.name: json.loads(p.read_text()) for p in folder.glob("*/final.json")}
    plan = json.loads((folder / "plan.json").read_text())
    means = {
        p["grid"]["strength"]: sum(finals[i]["valid"]["accuracy"] for i in p["trials"].values())
        for p in plan["rows"][1]["points"]
    }
    assert dropped["grid"] == {"strength": max(means, key=means.get)}
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/final.json")}
    code, out, _ = run(capsys, "run", tiny, "--out", out_dir)
    assert code == 0
    assert "6 already logged" in out
    assert "50 ± 1" in out
    assert {p: p.stat().st_mtime_ns for p in folder.glob("*/final.json")} == before


@pytest.mark.slow
def test_run_one_row_one_seed_with_a_changed_setting(capsys, tiny, tmp_path):
    arguments = [
        "run",
        tiny,
        "--out",
        tmp_path,
        "--row",
        "plain",
        "--seed",
        "1",
        "--set",
        "train.lr=0.01",
        "--json",
    ]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    answer = json.loads(out)
    assert answer["trials"] == {"finished": 1}
    (config,) = (tmp_path / answer["folder"]).glob("*/config.json")
    assert json.loads(config.read_text())["train"]["lr"] == 0.01
    assert answer["folder"] != str(tmp_path / "tiny-laptop")


def test_dry_run_runs_nothing(capsys, tiny, tmp_path):
    code, out, _ = run(capsys, "run", tiny, "--out", tmp_path / "runs", "--dry-run")
    assert code == 0
    assert "6 trials would run" in out
    assert "departure: a toy" in out
    assert not (tmp_path / "runs").exists()


def test_dry_run_of_a_tuned_recipe_counts_what_will_run(capsys, tmp_path):
    """11 rows, of which 8 choose from three points with one seed; then each at one point with ten seeds."""
    asked = [
        "run",
        "attentiondrop/noise_digits",
        "--scale",
        "study",
        "--out",
        tmp_path / "runs",
        "--dry-run",
    ]
    _, out, _ = run(capsys, *asked)
    assert "24 runs for selection on validation, then 110 would run" in out
    _, out, _ = run(capsys, *asked, "--row", "plain", "--row", "DropKey", "--seed", "0", "--json")
    answer = json.loads(out)
    assert (answer["tuning"], answer["chosen"]) == (3, 2)


def test_all_errors_of_a_recipe_come_at_once(capsys, tmp_path):
    path = tmp_path / "bad.toml"
    bad = (
        TINY.replace("EPOCHS", "0")
        .replace("drop_key", "drop_kye")
        .replace("patch_size", "patchsize")
    )
    path.write_text(bad.replace('name = "digits"', 'name = "digit"'))
    code, _, err = run(capsys, "run", path, "--out", tmp_path)
    assert code == 2
    assert "train.epochs: must be 1 or more" in err
    path.write_text(path.read_text().replace("epochs = 0", "epochs = 1"))
    code, _, err = run(capsys, "run", path, "--out", tmp_path)
    assert code == 2
    for hint in ("'drop_key'", "'patch_size'", "'digits'"):
        assert f"did you mean {hint}?" in err, err
    path.write_text(
        TINY.replace("metric", "metrik")
        .replace("[grid]", "[gird]")
        .replace("seeds = [0, 1]", "seeds = []")
    )
    code, _, err = run(capsys, "run", path, "--json", "--out", tmp_path)
    assert code == 2
    path.write_text("a = = 1")
    assert "not valid TOML" in run(capsys, "run", path)[2]
    assert "no such recipe" in run(capsys, "run", "explicit_dropout/tabel_1")[2]
    assert "no such file" in run(capsys, "run", "nowhere.toml")[2]


@pytest.mark.slow
def test_missing_data_has_its_own_exit_code(capsys, tmp_path):
    arguments = ["compare", "--data", "cifar10", "--methods", "drop_key", "--seeds", "1"]
    code, _, _ = run(capsys, *arguments, "--data-dir", tmp_path / "nowhere", "--out", tmp_path)
    assert code == 3


@pytest.mark.slow
def test_compare_says_plain_words(capsys, tmp_path):
    settings = [
        "--set",
        "train.epochs=1",
        "--set",
        "data.limit=200",
        "--set",
        "data.test_limit=100",
    ]
    model = "vit(patch_size=4, width=16, depth=1, heads=2, mlp=16)"
    methods = "drop_key(rate=0.5), drop_key + feed_forward_dropout(rate=0.2)"
    arguments = [
        "compare",
        "--data",
        "digits",
        "--model",
        model,
        "--methods",
        methods,
        "--seeds",
        3,
        *settings,
    ]
    code, out, err = run(capsys, *arguments, "--out", tmp_path, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["trials"] == {"finished": 9}
    assert [r["name"] for r in answer["rows"]] == ["plain", *methods.split(", ")]
    assert all(
        r["verdict"] in ("inconclusive", "equal", "better", "worse") for r in answer["rows"][1:]
    )
    assert "finished" in err  # progress goes to standard error
    code, out, _ = run(
        capsys, "compare", "--data", "digits", "--methods", "drop_kye", "--out", tmp_path
    )
    assert code == 2


@pytest.mark.slow
def test_a_second_comparison_keeps_what_the_first_recorded(capsys, tmp_path):
    common = ["--out", tmp_path, "--set", "train.max_steps=2", "--json"]
    code, out, _ = run(capsys, "compare", "--methods", "drop_key", "--seeds", "2", *common)
    assert code == 0
    code, out, _ = run(
        capsys, "compare", "--methods", "drop_path(rate=0.1)", "--seeds", "1", *common
    )
    result = json.loads(out)
    assert (code, result["trials"]) == (
        0,
        {"finished": 2},
    )  # what was asked for now: plain and drop_path
    assert {row["name"]: row["n"] for row in result["rows"]} == {
        "plain": 2,
        "drop_path(rate=0.1)": 1,
        "drop_key": 2,
    }
    plan = json.loads((Path(result["folder"]) / "plan.json").read_text())
    first, second = plan["header"]["command"].split(" && ")
    assert (
        first == "dampen compare --data digits --methods drop_key --seeds 2 --set train.max_steps=2"
    )
    assert "'drop_path(rate=0.1)' --seeds 1" in second
    run(
        capsys, "compare", "--methods", "drop_path(rate=0.1)", "--seeds", "1", *common
    )  # the same again adds nothing
    assert (
        json.loads((Path(result["folder"]) / "plan.json").read_text())["header"] == plan["header"]
    )


@pytest.mark.parametrize(
    ("accelerator", "words"), [("gpu", "got 'gpu'"), ("cuda", "no cuda device here; use cpu")]
)
def test_a_bad_accelerator_is_found_before_anything_runs(capsys, tmp_path, accelerator, words):
    if accelerator == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    code, _, err = run(capsys, "compare", "--accelerator", accelerator, "--out", tmp_path / "runs")
    assert code == 2
    assert words in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_demo_compares_every_family_and_says_what_to_type_next(capsys, tmp_path, monkeypatch):
    from dampen.studies import recipe as demo

    real = demo.demo_recipe

    def shorter(known, seeds):
        recipe = real(known, seeds)
        recipe.base["train"] |= {"epochs": 1, "warmup": 0.0, "validate_every": 1}
        recipe.base["data"] |= {"limit": 200, "test_limit": 50}
        return recipe

    monkeypatch.setattr(demo, "demo_recipe", shorter)
    code, out, _ = run(capsys, "demo", "--out", tmp_path, "--seeds", "2")
    assert code == 0
    from dampen.registry import methods

    for family, specs in demo.FAMILIES:
        if all(s["name"] in methods() for s in specs):
            assert family in " ".join(out.split()), family
    assert len(demo.FAMILIES) <= 9  # and the plain row
    assert "reference" in out
    assert "Too few runs" in out
    assert all(line in out for line in NEXT)
    assert "A step of this small model takes" in out  # beside the cost
    assert (tmp_path / "demo" / "report.html").exists()


def test_what_the_demo_says_to_type_next_can_be_typed(capsys, tmp_path, monkeypatch):
    """On a folder of images and a script of those names: every line is understood, up to the plan."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "FOLDER_OF_IMAGES")
    (tmp_path / "train.py").write_text("def train(trial):\n    return {'accuracy': 1.0}\n")
    seen = []
    monkeypatch.setattr(
        "dampen.cli.compare.preview",
        lambda asked, *_: seen.append([r.name for r in asked.plan.configs]),
    )
    for line in NEXT:
        arguments = shlex.split(line, comments=True)[1:]
        code, out, err = run(
            capsys, *arguments, *(["--dry-run"] if arguments[0] == "compare" else [])
        )
        assert code == 0, out + err
    assert seen == [
        ["plain", "patch_dropout", "drop_key"],
        ["plain", "drop_key", "r_drop + drop_head"],
    ]


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_the_same_command_resumes(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(TINY.replace("EPOCHS", "60"))
    command = [
        "run",
        str(path),
        "--row",
        "plain",
        "--seed",
        "0",
        "--workers",
        "2",
        "--out",
        str(tmp_path / "runs"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "dampen", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored under `nohup make test &`
    )
    deadline = time.monotonic() + 200
    while not list((tmp_path / "runs").glob("*/*/log.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 130, out
    assert f"To resume: dampen run {path}" in out.replace("\n", " ").replace("  ", " ")
    assert list((tmp_path / "runs").glob("*/*/checkpoint-*.pt"))
    assert not list((tmp_path / "runs").glob("*/*/final.json"))
    done = subprocess.run(
        [sys.executable, "-m", "dampen", *command, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (final,) = (tmp_path / "runs").glob("*/*/final.json")
    assert json.loads(final.read_text())["resumed"] == 1
    assert not list((tmp_path / "runs").glob("*/*/checkpoint-*.pt"))


def test_doctor_and_data(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--json", "--data-dir", tmp_path)
    answer = json.loads(out)
    assert answer["ok"] is (code == 0)
    assert (
        "--tune was removed" in run(capsys, "doctor", "--json", "--data-dir", tmp_path, "--tune")[2]
    )
    found = {f["what"]: f for f in answer["findings"]}
    assert found["fused attention"]["ok"]
    assert found["data digits"]["found"] == "embedded"
    listed = json.loads(run(capsys, "data", "list", "--json")[1])
    assert {"digits", "cifar10", "gtzan"} <= {d["name"] for d in listed}
    code, _, err = run(capsys, "data", "get", "cifra10")
    assert code == 2
    assert "did you mean 'cifar10'?" in err
    code, out, _ = run(capsys, "data", "get", "fsdd")
    assert code == 0
    assert "git clone" in out
    code, _, err = run(capsys, "data", "check", tmp_path / "nothing")
    assert code == 3
    assert "no such file" in err


def test_missing_data_stops_every_trial_with_its_own_exit_code(capsys, tmp_path):
    """Trials that were therefore never started are not 'interrupted'."""
    arguments = ["--data", "cifar10", "--methods", "drop_key", "--seeds", "2", "--workers", "1"]
    code, out, err = run(
        capsys, "compare", *arguments, "--data-dir", tmp_path / "none", "--out", tmp_path / "runs"
    )
    assert code == 3
    assert "To resume" not in out + err
    assert "Next" not in out + err


@pytest.mark.parametrize(
    ("method", "example"),
    [
        ("explicit_dropout", "value=0.05"),
        ("arora_dropout", "value=0.05"),
        ("skip_ablation", "attention=True"),
    ],
)
def test_a_method_that_would_do_nothing_is_refused_with_an_example(
    capsys, tmp_path, method, example
):
    code, _, err = run(capsys, "compare", "--methods", method, "--out", tmp_path)
    assert code == 2
    assert "does nothing" in err
    assert example in err
    code, out, _ = run(capsys, "show", method)
    assert code == 0
    assert example in out.split("Next:")[1]


def test_paths_that_cannot_be_used_are_told_in_a_line(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(
        capsys, "compare", "--methods", "drop_key", "--seeds", "1", "--out", tmp_path / "file"
    )
    assert code == 2
    assert "cannot be used" in err
    assert (tmp_path / "file").read_text() == "mine"
    code, _, err = run(capsys, "bench", "--chart", tmp_path / "x.foo")
    assert code == 2
    assert ".svg, .png, .html" in err


@pytest.mark.parametrize(
    ("command", "old"),
    [
        (["compare", "--data", "digits", "--same-code"], "--same-code"),
        (["run", "no_such.toml", "--partial", "--no-weights"], "--partial"),
        (["run", "no_such.toml", "--partial", "--no-weights"], "--no-weights"),
    ],
)
def test_options_of_0_2_work_and_name_their_successors(capsys, command, old):
    code, _, err = run(capsys, *command)
    assert f"{old} is deprecated, use {RENAMED[old]}. It stops working in 0.4." in err
    assert code == 2
    assert "No such option" not in err
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    assert old not in capsys.readouterr().out.split()  # hidden
