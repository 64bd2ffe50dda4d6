"""Signals from outside: a run that is told to go checkpoints first, workers too; the helper ends with its command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import saved_states

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no process groups with signals"
)
COMPARE = [
    sys.executable,
    "-m",
    "dampen",
    "compare",
    "--data",
    "digits",
    "--methods",
    "drop_key",
    "--seeds",
    "1",
]
SETTINGS = [
    "train.epochs=2000",
    "data.limit=300",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.mlp=16",
]


def wait_for(what, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError("waited too long")


def processes_of(group: int) -> list[int]:
    """The processes of a group that are not zombies; the third and fifth field of /proc/PID/stat say so."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own, *_ = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # ended while we looked
            continue
        if int(own) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_leaves_a_run_that_resumes(tmp_path, number):
    command = [
        *COMPARE,
        "--workers",
        "2",
        "--json",
        "--out",
        str(tmp_path),
        *(p for s in SETTINGS for p in ("--set", s)),
    ]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("*/*/log.jsonl"))) == 2)
        os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert json.loads(out)["trials"] == {"interrupted": 2}
        for folder in tmp_path.glob("*/*/"):
            (state, *_) = saved_states(
                folder, "checkpoint"
            )  # taken when the signal came: no line of the log is ahead
            assert len(RunStore(folder).lines()) > 0
            assert int(state.name.split("-")[1]) >= RunStore(folder).lines()[-1]["step"]
        wait_for(lambda: not processes_of(process.pid), 20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_helper_ends_with_a_command_that_fails_at_once(tmp_path):
    """Its output goes through a pipe, which whoever holds it keeps open: `dampen ... | tee log` must not wait."""
    code = "from dampen.studies.processes import warm_up; warm_up(); print('failed', flush=True); import os; os._exit(3)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"failed\n"
        # until the last process that holds the pipe is gone: a helper that lived on would block here
        assert process.stdout.read() == b""
        assert process.wait() == 3
    wait_for(lambda: not processes_of(process.pid), 5)


def test_ctrl_c_while_the_helper_still_imports_prints_nothing():
    """The terminal sends it to the whole group; the command says what there is to say."""
    code = (
        "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: None); "
        "from dampen.studies.processes import warm_up; warm_up(); print('warming', flush=True); "
        "signal.pause(); time.sleep(3); os._exit(0)"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == b"warming\n"
            wait_for(
                lambda: [
                    pid
                    for pid in processes_of(process.pid)
                    if pid != process.pid and _imports_torch(pid)
                ]
            )
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stderr.read() == b""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _imports_torch(pid: int) -> bool:
    """Whether torch's libraries are in a process by now."""
    try:
        return "libc10" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # ended while we looked
        return False


def test_who_imports_the_preload_of_the_server_still_hears_ctrl_c():
    """Doctests import every module of the source tree: only the server itself may ignore signals."""
    code = "import signal, dampen.studies.preload; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    hears = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - ignored under `nohup make test &`
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=hears,
    )
    assert done.stdout.strip() == "True"


def test_the_processes_module_does_not_import_torch():
    """The server watches its parent before anything heavy is imported."""
    code = "import sys, dampen.studies.processes; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
