"""A command that is killed or terminated: its workers end, whatever the function does, and the run resumes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from dampen.studies.engines import Job
from dampen.studies.engines.local import LocalEngine
from dampen.studies.errors import Terminated
from dampen.studies.sequential import Race
from dampen.studies.trainer.checkpoint import saved_states
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.user_function import function_in_file
from tests.studies.engines.test_signals import processes_of, wait_for

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no process groups with signals"
)
STUBBORN = """
import dampen


def train(trial):
    import threading, time
    trial.regularize(dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2))
    trial.checkpoint({"step": 1})
    (trial.folder / "here").write_text("")
    threading.Thread(target=time.sleep, args=(1000,)).start()
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass
"""


@pytest.fixture
def command(tmp_path):
    """A comparison, in a process group of its own, of a function that never listens."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    started = []

    def start(*more):
        words = [
            f"{tmp_path / 'stubborn.py'}:train",
            "--methods",
            "drop_key",
            "--seeds",
            "1",
            "--workers",
            "2",
        ]
        words += ["--out", str(tmp_path / "runs"), "--json", *more]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "dampen", "compare", *words],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        wait_for(lambda: len(list(tmp_path.glob("runs/**/here"))) == 2)
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None or processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_workers_end_when_the_command_is_killed(command):
    process = command()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    wait_for(lambda: not processes_of(process.pid), 15)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--until-decided",), ("--budget", "1h")])
def test_sigterm_ends_a_command_whose_function_never_listens(command, tmp_path, more):
    process = command(*more)
    os.kill(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert set(json.loads(out)["trials"]) == {"interrupted"}
    wait_for(lambda: not processes_of(process.pid), 15)
    for place in tmp_path.glob("runs/**/here"):
        assert saved_states(place.parent, "checkpoint")


@pytest.mark.slow
def test_ctrl_c_in_the_first_round_of_a_race_is_a_stop_that_resumes(command, tmp_path):
    polite = (
        STUBBORN.split("    threading")[0]
        + "    while True:\n        trial.log(step=1)\n        time.sleep(0.1)\n"
    )
    (tmp_path / "stubborn.py").write_text(polite)
    process = command("--until-decided")
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=40)
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert set(json.loads(out)["trials"]) == {"interrupted"}


def test_a_race_without_results_has_words():
    assert "the same command resumes" in Race({}, 2, 1, "stopped").told()


@pytest.mark.slow
def test_a_thread_that_a_function_leaves_behind_keeps_nobody_waiting(tmp_path, ask_threads):
    jobs, execution = ask_threads
    outcomes = LocalEngine(workers=1).run(jobs, execution, lambda *_: None)
    assert {o.status for o in outcomes.values()} == {"finished"}
    assert multiprocessing.active_children() == []  # though the thread would sleep for 1000 s


@pytest.fixture
def ask_threads(tmp_path):
    """The jobs of a function that leaves a thread behind, and how to run them."""
    from dampen.studies.request import request_own

    path = tmp_path / "leaves.py"
    path.write_text(STUBBORN.split("    while True")[0] + '    return {"nll": 1.0}\n')
    asked = request_own(function_in_file(f"{path}:train"), "drop_key", 1, folder=tmp_path / "runs")
    asked.plan.save(asked.folder)
    jobs = [Job(run, asked.folder / run.id) for run in asked.plan.chosen()]
    return jobs, Execution(threads=1, function=asked.function)


@pytest.mark.parametrize("terminal", [False, True])
def test_signals_that_were_ignored_stay_ignored_but_for_ctrl_c_at_a_terminal(monkeypatch, terminal):
    from dampen.cli.running import heed_signals

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"isatty": staticmethod(lambda: terminal)}))
    try:
        for name in names:
            signal.signal(name, signal.SIG_IGN)
        heed_signals()
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == (
            signal.default_int_handler if terminal else signal.SIG_IGN
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        heed_signals()
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
