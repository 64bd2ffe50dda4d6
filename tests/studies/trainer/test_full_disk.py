"""A full disk is said to be one (exit 6), costs nothing that was recorded, and the run goes on when there is space."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import pytest

from dampen.studies.comparison import make_comparison
from dampen.studies.engines.runner import run_comparison
from dampen.studies.errors import DiskFull
from dampen.studies.report import write_report
from dampen.studies.request import comparison
from dampen.studies.store import RunStore
from dampen.studies.trainer.train import run_trial
from tests.studies.interrupted import same
from tests.studies.synthetic_runs import write_study

SETTINGS = [
    "data.limit=300",
    "train.epochs=2",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.mlp=16",
]


@contextmanager
def small_disk(folder: Path, size: str):
    """A real file system of a few MiB. Only root may mount one, and some containers forbid it to root."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


needs_mount = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None,
    reason="only root mounts a tmpfs",
)


def leave(disk: Path, free: int) -> Path:
    """Fill the disk until `free` bytes are left."""
    ballast = disk / "ballast"
    stat = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(stat.f_bavail * stat.f_frsize - free, 1))
    return ballast


@needs_mount
def test_a_trial_on_a_full_disk_says_so_and_resumes(tmp_path, small, quick):
    """Before this test, one of these points was reported as a full disk; the others as failures of torch's writer."""
    trial = small(epochs=2)
    whole = run_trial(trial, tmp_path / "whole", quick)
    execution = replace(quick, checkpoint_steps=3)
    with small_disk(tmp_path / "disk", "3m") as disk:
        for free in (0, 4096, 12_000, 60_000, 100_000, 150_000, 200_000):
            shutil.rmtree(disk / "trial", ignore_errors=True)
            ballast = leave(disk, free)
            with pytest.raises(
                DiskFull, match=r"No space left while writing .*resumes from the last checkpoint"
            ):
                run_trial(trial, disk / "trial", execution)
            assert not list(disk.rglob(".*.tmp"))
            ballast.unlink()
            result = run_trial(trial, disk / "trial", execution)
            assert same(result, whole)
            assert RunStore(disk / "trial").final() == result


@needs_mount
@pytest.mark.slow
def test_a_run_on_a_full_disk_hands_out_no_more_trials(tmp_path, quick):
    plan = make_comparison(comparison("digits", None, "drop_key", 4), settings=SETTINGS)
    trials = plan.chosen()
    with small_disk(tmp_path / "disk", "4m") as disk:
        ballast = leave(disk, 200_000)
        run = run_comparison(
            plan, disk / "run", trials, replace(quick, checkpoint_steps=2), workers=2
        )
        assert run.exit_code == 6
        assert any("No space left" in message for message in run.messages())
        unstarted = [t for t in trials if not (disk / "run" / t.id).exists()]
        assert unstarted  # handed out to nobody
        ballast.unlink()
        again = run_comparison(plan, disk / "run", trials, quick, workers=2)
        assert again.exit_code == 0
        assert again.counts() == {"finished": len(trials)}


@needs_mount
def test_a_report_on_a_full_disk_leaves_the_old_page_whole(tmp_path):
    write_study(tmp_path / "study", seeds=2)
    with small_disk(tmp_path / "disk", "2m") as disk:
        page = disk / "report.html"
        page.write_text("the old page")
        for free in (0, 4096, 40_000):
            ballast = leave(disk, free)
            with pytest.raises(DiskFull, match=r"No space left while writing .*report\.html"):
                write_report([tmp_path / "study"], page)
            assert page.read_text() == "the old page"
            assert sorted(p.name for p in disk.iterdir()) == ["ballast", "report.html"]
            ballast.unlink()
        write_report([tmp_path / "study"], page)
        assert "</html>" in page.read_text()


def test_an_error_that_cannot_be_written_down_is_a_full_disk(tmp_path, small, quick, monkeypatch):
    """A failing trial writes error.json; where that fails too, the worker lives on and says so."""
    from dampen.studies import engines

    def full(path, value):
        raise DiskFull(f"No space left while writing {path}.")

    monkeypatch.setattr(engines, "write_json", full)
    monkeypatch.setattr("dampen.studies.trainer.train.run_trial", lambda *a: 1 / 0)
    outcome = engines.run_job(engines.Job(small(), tmp_path), quick, lambda e: None, lambda: False)
    assert outcome.status == "disk full"
    assert "division by zero" in outcome.message


def test_a_full_disk_outside_records_is_exit_6(capsys):
    import typer

    from dampen.cli.common import command

    @command("x")
    def fails():
        raise OSError(ENOSPC, "No space left on device")

    with pytest.raises(typer.Exit) as left:
        fails()
    assert left.value.exit_code == 6
    assert "No space left" in capsys.readouterr().err
