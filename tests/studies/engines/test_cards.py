"""One worker per GPU, each with its own; on a machine without one the count is mocked."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dampen.studies.engines import local, ray
from dampen.studies.trainer.state import Execution


@pytest.fixture
def machine(monkeypatch):
    """Four cards and 64 cores."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(local, "usable_cores", lambda: 64)
    monkeypatch.delenv(local.VISIBLE, raising=False)


def jobs(count, devices=1):
    train = SimpleNamespace(devices=devices)
    return [SimpleNamespace(trial=SimpleNamespace(train=train)) for _ in range(count)]


def test_one_worker_per_card(machine):
    engine = local.LocalEngine()
    places = engine._places(jobs(20), Execution())
    assert places == ["0", "1", "2", "3"]
    assert engine.shares(20, len(places)) == (4, 16)
    assert engine.shares(2, len(places)) == (2, 32)


def test_workers_share_cards_on_request(machine):
    places = local.LocalEngine(per_gpu=2)._places(jobs(20), Execution())
    assert sorted(places) == sorted("01230123")
    assert local.least_used(places, ["0", "1", "2", "3", "0"]) == "1"
    with pytest.raises(ValueError, match="per_gpu"):
        local.LocalEngine(per_gpu=0)


def test_runs_on_several_cards_share_none(machine):
    assert local.LocalEngine()._places(jobs(3, devices=2), Execution()) == ["0,1", "2,3"]


def test_a_users_choice_of_cards_holds(machine, monkeypatch):
    monkeypatch.setenv(local.VISIBLE, "2, GPU-abc")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local.visible_gpus() == ["2", "GPU-abc"]
    monkeypatch.setenv(local.VISIBLE, "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert local.LocalEngine()._places(jobs(3), Execution()) == []


def test_the_cpu_counts_cores(machine):
    engine = local.LocalEngine()
    assert engine._places(jobs(9), Execution(accelerator="cpu")) == []
    assert engine.shares(9, 0) == (9, 7)


def test_no_card_here():
    assert torch.version.cuda is not None or local.visible_gpus() == []


def test_a_worker_sees_its_card(monkeypatch, tmp_path):
    """The card is set before the run begins, whatever function of the user's it trains."""
    import os

    seen = []
    monkeypatch.setenv(local.VISIBLE, "0,1")
    monkeypatch.setattr(local, "stop_on_signals", lambda handler: None)
    monkeypatch.setattr(
        local, "run_job", lambda *a: seen.append(os.environ[local.VISIBLE]) or "outcome"
    )
    pipe = SimpleNamespace(send=lambda message: None, poll=lambda: False)
    (job,) = jobs(1)
    job.folder = tmp_path
    local._work(pipe, job, Execution(), "3")
    assert seen == ["3"]


SERVER = """
import torch
torch.version.cuda = "13.0"  # as if this torch were built for CUDA
asked = []
for name in ("is_available", "device_count", "current_device", "_lazy_init"):
    setattr(torch.cuda, name, lambda *a, name=name: asked.append(name) or 0)
import dampen.studies.preload
assert asked == [], asked
"""


def test_the_server_of_the_workers_does_not_touch_cuda():
    """A process that was forked after CUDA began cannot use it."""
    ran = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize(
    ("accelerator", "cluster", "expected"),
    [
        ("auto", {"GPU": 2.0}, {"num_cpus": 3, "num_gpus": 2}),
        ("cuda", {"GPU": 2.0}, {"num_cpus": 3, "num_gpus": 2}),
        ("auto", {"CPU": 8.0}, {"num_cpus": 3}),
        ("cpu", {"GPU": 2.0}, {"num_cpus": 3}),
        ("mps", {"GPU": 2.0}, {"num_cpus": 3}),
    ],
)
def test_ray_asks_for_gpus_where_there_are_any(accelerator, cluster, expected):
    asked = []
    run = ray._Run.__new__(ray._Run)  # without a cluster
    run.ray = SimpleNamespace(cluster_resources=lambda: cluster)
    execution = Execution(threads=3, accelerator=accelerator)
    run.execution, run.mailbox, run.running = execution, None, {}
    submitted = SimpleNamespace(remote=lambda *given: "reference")
    run.task = SimpleNamespace(options=lambda **options: asked.append(options) or submitted)
    (job,) = jobs(1, devices=2)
    run._submit(SimpleNamespace(job=job, tries=0))
    assert asked == [expected]
