"""A worker that dies inside a user's function: its trial is taken up again, or called failed, and nothing is lost."""

import pytest

import dampen
from dampen.studies.engines import RETRIES, Job, after_death, make_engine
from dampen.studies.report import make_report
from dampen.studies.result import Event
from dampen.studies.trainer.state import Execution

DIES = """
        if trial.row == "drop_head(rate=0.5)" and epoch == 1 and first == 0:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
"""
ALWAYS = """
    if trial.row == "drop_head(rate=0.5)":
        import os
        os._exit(3)
"""


def run_all(asked):
    """Every trial on one real worker; what was said of each row."""
    asked.plan.save(asked.folder)
    said: dict[str, list[Event]] = {}
    jobs = [Job(trial, asked.folder / trial.id) for trial in asked.plan.chosen()]
    names = asked.function.rows
    engine = make_engine("local", workers=1)
    execution = Execution(threads=1, checkpoint_seconds=0.0, function=asked.function)
    outcomes = engine.run(
        jobs, execution, lambda trial, event: said.setdefault(names[trial], []).append(event)
    )
    return {names[i]: outcome for i, outcome in outcomes.items()}, said


@pytest.mark.slow
def test_a_killed_worker_goes_on_from_the_checkpoint_of_the_function_bit_exactly(
    script, ask, run, tmp_path
):
    script.write_text(
        script.read_text().replace(
            "        trial.checkpoint(state)\n", f"        trial.checkpoint(state)\n{DIES}"
        )
    )
    outcomes, said = run_all(ask("drop_head(rate=0.5)", 1))
    assert {o.status for o in outcomes.values()} == {"finished"}
    (warning,) = [e for events in said.values() for e in events if e.kind == "warning"]
    assert (
        warning.message == "Its worker was killed by SIGKILL; it resumes from its last checkpoint."
    )
    again = [e for e in said["drop_head(rate=0.5)"] if e.kind == "start" and e.resumed]
    assert [e.resumed for e in again] == [1]
    assert outcomes["drop_head(rate=0.5)"].result["resumed"] == 1
    script.write_text(script.read_text().replace("os.kill(os.getpid(), signal.SIGKILL)", "pass"))
    whole = run(ask("drop_head(rate=0.5)", 1, folder=tmp_path / "whole"))
    for row, outcome in outcomes.items():
        assert outcome.result["last_weights"] == whole[row, 0]["last_weights"]
        assert outcome.result["test"] == whole[row, 0]["test"]


@pytest.mark.slow
def test_a_function_that_always_kills_its_worker_is_a_failed_row_that_says_why(
    script, tmp_path, capfd
):
    script.write_text(
        script.read_text().replace("def train(trial):\n", f"def train(trial):\n{ALWAYS}")
    )
    options = {"folder": tmp_path / "study", "workers": 1, "threads": 1, "params": {"epochs": 1}}
    study = dampen.compare(
        f"{script}:train", methods="drop_head(rate=0.5), drop_key", seeds=1, **options
    )
    why = f"Its worker died {RETRIES + 1} times; the last one ended with code 3 (out of memory?)."
    assert study.verdicts["drop_head(rate=0.5)"] == f"failed: {why}"
    assert {row.name: row.summary.n for row in study.rows} == {
        "plain": 1,
        "drop_head(rate=0.5)": 0,
        "drop_key": 1,
    }
    assert (
        capfd.readouterr().err.count(
            "drop_head(rate=0.5) seed 0: Its worker ended with code 3; it starts again."
        )
        == 2
    )
    assert dampen.load(study.folder).failures == {"drop_head(rate=0.5) seed 0": why}
    (table,) = make_report([study.folder]).tables
    assert [e.verdict for e in table.entries] == ["reference", "failed", "inconclusive"]


def test_a_trial_that_died_too_often_keeps_the_reason_in_its_folder(tmp_path, small):
    job = Job(small(), tmp_path)
    assert after_death(job, "died (WorkerCrashedError)", 1) == (
        "Its worker died (WorkerCrashedError); it starts again.",
        None,
    )
    message, outcome = after_death(job, "was killed by SIGKILL", RETRIES + 1)
    assert (outcome.status, outcome.message) == ("failed", message)
    assert message in (tmp_path / "error.json").read_text()
