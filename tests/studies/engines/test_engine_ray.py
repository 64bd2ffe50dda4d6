"""The Ray engine on a real local cluster."""

import json
import os
import signal
from dataclasses import replace

import pytest

from dampen.studies.engines import Job, make_engine
from dampen.studies.engines.ray import bring_home
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.train import run_trial


def test_a_record_that_is_only_on_its_node_is_brought_home(tmp_path):
    bring_home(tmp_path / "a", {"final.json": b"{}", "log.jsonl": b"x\n"})
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["final.json", "log.jsonl"]
    bring_home(tmp_path / "a", {"final.json": b"[]"})  # what is here stays
    assert (tmp_path / "a" / "final.json").read_bytes() == b"{}"
    bring_home(tmp_path / "b", {})
    assert not (tmp_path / "b").exists()


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'dampen\[ray\]'"):
        make_engine("ray")


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize(
    ("address", "told"),
    [
        (None, "Ray did not start on this machine: too slow"),
        ("10.0.0.1:6379", "no Ray cluster at 10.0.0.1:6379: too"),
    ],
)
def test_a_node_that_does_not_start_in_time_is_told_in_words(
    tmp_path, monkeypatch, small, quick, address, told
):
    """Ray raises Exception itself, after half a minute: that was a traceback on a busy machine."""
    import ray

    def late(**options):
        raise Exception("too slow")

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(LabError, match=told):
        make_engine("ray", address=address).run(
            [Job(small(), tmp_path)], quick, lambda trial, event: None
        )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_a_killed_worker_loses_nothing_and_doubles_nothing(tmp_path, small, quick):
    good = [small(seed=s, epochs=1) for s in range(2)]
    long = small(
        seed=9, epochs=100
    )  # long enough that the kill arrives before its end on any machine
    bad = Run.from_dict(
        {**long.to_dict(), "model": {"name": "vit", "patch_size": 3}}
    )  # 3 does not divide 8
    events, warnings, killed = [], [], []

    def report(trial, event):
        events.append((trial, event.kind))
        if event.kind == "warning":
            warnings.append(event.message)
        if trial == long.id and event.kind == "progress" and event.step >= 12 and not killed:
            killed.append(int((tmp_path / trial / "lock.holder").read_text().split()[1]))
            os.kill(killed[0], signal.SIGKILL)

    jobs = [Job(t, tmp_path / t.id) for t in [long, *good, bad]]
    outcomes = make_engine("ray", workers=2).run(jobs, replace(quick, checkpoint_steps=5), report)
    assert killed
    assert [o.status for o in outcomes.values()] == ["finished"] * 3 + ["failed"]
    assert "patch" in outcomes[bad.id].message
    (warning,) = warnings
    assert "resumes from its last checkpoint" in warning
    # nothing lost: the same weights as without Ray and without a death, and a whole log
    whole = run_trial(long, tmp_path / "alone", quick)
    final = RunStore(tmp_path / long.id).final()
    assert final["last_weights"] == whole["last_weights"]
    assert final["resumed"] == 1
    assert [line["epoch"] for line in RunStore(tmp_path / long.id).lines()] == list(range(1, 101))
    # nothing doubled: one outcome each, one folder each, no lock and no checkpoint left
    assert sorted(t for t, kind in events if kind == "outcome") == sorted(outcomes)
    for trial in [long, *good]:
        names = {p.name for p in (tmp_path / trial.id).iterdir()}
        assert {"config.json", "environment.json", "final.json", "log.jsonl"} <= names
        assert not [n for n in names if n.startswith(("checkpoint", "lock.", "."))]
        assert len(
            json.loads((tmp_path / trial.id / "environment.json").read_text())["sessions"]
        ) == (2 if trial is long else 1)
