"""For programs: the JSON document and its version, exit codes, the noise of the baseline, and what AGENTS.md says."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from dampen.cli.common import SCHEMA
from dampen.cli.noise import COUNTS, measured
from dampen.studies.engines.runner import EXIT_CODES, ComparisonResult
from dampen.studies.report import make_report
from dampen.studies.report.machine import (
    VERSION,
    Answers,
    Document,
    Failure,
    Interval,
    Method,
    StepCost,
    document,
)
from tests.cli.test_answers import TRAIN, run
from tests.studies.synthetic_runs import write_study

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return "train.py:train"


def test_the_document_is_what_its_types_say(tmp_path):
    """Decoded strictly, from the text that is printed."""
    plan = write_study(tmp_path, seeds=8)
    table = make_report([tmp_path]).tables[0]
    plain = document(ComparisonResult(plan, tmp_path, {}, table), tmp_path / "report.html")
    found = msgspec.json.decode(json.dumps(plain, allow_nan=False), type=Document)
    assert found.schema == VERSION == SCHEMA
    assert found.reference == "plain"
    assert found.answers.pick in {m.name for m in found.methods}
    assert found.answers.code.startswith("dampen.regularize(model, ")
    better = {m.name: m for m in found.methods}["R-Drop"]
    assert better.verdict == better.comparison.verdict == "better"
    assert better.comparison.low < better.comparison.difference < better.comparison.high
    assert better.cost.low <= better.cost.ratio <= better.cost.high
    assert better.cost.differs
    assert better.settings == "weight=1.0"
    assert better.code == "dampen.regularize(model, dampen.RDrop())"


def test_the_documentation_names_every_field_and_exit_code():
    text = (ROOT / "docs" / "json.md").read_text()
    fields = [
        f
        for cls in (Document, Method, Interval, StepCost, Answers, Failure)
        for f in cls.__struct_fields__
    ]
    assert [f for f in dict.fromkeys(fields) if f"`{f}`" not in text] == []
    assert f"now {VERSION}" in text
    for code in {*EXIT_CODES.values(), 0, 2}:
        assert re.search(rf"^\\| {code} \\|", text, re.MULTILINE), code


@pytest.mark.slow
def test_failures_and_exit_codes_are_in_the_document(capsys, script):
    command = ["compare", script, "--seeds", "3", "--no-report", "--json"]
    code, out, _ = run(capsys, *command, "--methods", "params(fails=True), params(bonus=0.1)")
    out = out[out.index("{") :]  # the script prints when the command imports it
    found = msgspec.json.decode(out, type=Document)
    assert code == found.exit_code == 1
    assert {f.method for f in found.failures} == {"params(fails=True)"}
    assert len(found.failures) == 3
    assert {m.name: m.verdict for m in found.methods}["params(fails=True)"] == "failed"
    code, out, _ = run(capsys, "compare", script, "--methods", "drop_kye", "--json")
    assert json.loads(out) == {
        "schema": 1,
        "error": json.loads(out)["error"],
        "exit_code": code == 2 and 2,
    }


@pytest.mark.slow
def test_noise_measures_the_baseline_and_compare_counts_its_runs(capsys, script):
    code, out, err = run(capsys, "noise", script, "--seeds", "5", "--json")
    assert code == 0, err
    found = json.loads(out[out.index("{") :])
    values = list(found["values"].values())
    assert (found["n"], len(values), found["schema"]) == (5, 5, 1)
    assert found["sd"] == pytest.approx(
        (sum((v - sum(values) / 5) ** 2 for v in values) / 4) ** 0.5
    )
    assert list(found["detectable"]) == [str(n) for n in COUNTS]
    assert sorted(found["detectable"].values(), reverse=True) == list(found["detectable"].values())
    code, out, err = run(
        capsys, "compare", script, "--methods", "params(bonus=0.1)", "--seeds", "5", "--no-report"
    )
    assert "10 runs in" in out
    assert "5 already logged" in out
    code, out, _ = run(capsys, "noise", script, "--seeds", "5")
    assert code == 0
    assert "with a standard deviation of" in out
    assert "80 % power" in out


def test_noise_of_a_baseline_that_does_not_vary_is_said(tmp_path):
    write_study(tmp_path, noise=0.0)
    found = measured(make_report([tmp_path]).tables[0], "dampen compare train.py:train")
    assert found["next"].startswith("dampen compare train.py:train --methods ")


def test_agents_are_told_of_commands_and_options_that_exist(capsys):
    """Every `dampen ...` in AGENTS.md and llms.txt names a command, and options that its help lists."""
    from dampen.cli import available

    for name in ("AGENTS.md", "llms.txt"):
        text = (ROOT / name).read_text()
        for command in re.findall(r"`(dampen [^`]+)`", text):
            words = command.split()
            assert words[1] in available(), command
            help_text = run(capsys, words[1], "--help")[1]
            for option in re.findall(r"--[a-z-]+", command):
                assert option in help_text, command
        for path in re.findall(r"\]\(([^)]+)\)", text):
            assert (ROOT / path).exists(), path
