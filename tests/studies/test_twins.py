"""Rows that are the same training are trained once, and the table says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dampen
from dampen.native import library
from dampen.studies.comparison import Comparison, make_comparison
from dampen.studies.data.dataset import DamagedData
from dampen.studies.engines.runner import ComparisonResult, run_comparison, training_of
from dampen.studies.recipe import Recipe
from dampen.studies.result import Event
from dampen.studies.store import RunStore, locked
from dampen.studies.trainer.state import Execution

EXPLICIT = "explicit_dropout"


def plan_of(*rows: tuple[str, dict[str, Any]], seeds: int = 2) -> Comparison:
    base = {
        "data": {"name": "digits", "train_fraction": 0.1},
        "model": {"name": "vit", "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "mlp": 8},
        "train": {"epochs": 1, "batch_size": 64},
        "seeds": list(range(seeds)),
    }
    named: list[dict[str, Any]] = [{"name": "plain", "methods": [], "baseline": True}]
    named += [{"name": name, "methods": [method]} for name, method in rows]
    facts = {
        "name": "twins",
        "title": "",
        "paper": "",
        "table": "",
        "cost": "",
        "command": "",
        "departures": [],
    }
    return make_comparison(
        Recipe(**facts, metric="accuracy", base=base, rows=named, scales={"laptop": {}})
    )  # type: ignore[arg-type]


def run(
    plan: Comparison, folder: Path, only: str | None = None, **options: Any
) -> tuple[ComparisonResult, list[str], list[dict[str, Any]]]:
    """The result, the trials that really began, and the outcomes that were told."""
    began, told = [], []

    def report(trial: str, event: Event) -> None:
        if event.kind == "start":
            began.append(trial)
        elif event.kind == "outcome":
            told.append({"trial": trial, "status": event.status, "message": event.message})

    chosen = plan.chosen([only] if only else [])
    done = run_comparison(
        plan, folder, chosen, Execution(threads=1, accelerator="cpu"), report, workers=1, **options
    )
    return done, began, told


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    plan = plan_of(
        ("q", {"name": EXPLICIT, "query": 0.5}), ("k", {"name": EXPLICIT, "key": 0.5, "rate": 0.2})
    )
    folder = tmp_path_factory.mktemp("twins")
    return (plan, folder, *run(plan, folder))


def test_query_and_key_are_trained_once(ran: Any) -> None:
    plan, folder, result, began, told = ran
    assert len(plan.runs) == 6
    assert len(began) == 4
    assert result.exit_code == 0
    assert {t["trial"] for t in told} == set(plan.runs), "the bar counts every trial"
    k = plan.configs[2].settings[0].ids
    assert not {*k.values()} & {*began}
    for seed, trial in k.items():
        final = RunStore(folder / trial).final()
        assert final is not None
        assert final["same_as"] == plan.configs[1].settings[0].ids[seed]
        assert final["id"] == trial
        assert RunStore(folder / trial).lines()
        assert list((folder / trial).glob("weights-*.safetensors"))


def test_the_table_says_so_and_counts_them_once(ran: Any) -> None:
    table = ran[2].table
    entry = table.entry("k")
    assert entry.same_as == "q"
    assert entry.told(table.metric) == "same as q"
    assert [e.name for e in table.compared()] == ["q"]


def test_training_both_would_have_given_the_same_weights(ran: Any, tmp_path: Path) -> None:
    folder = ran[1]
    other = plan_of(("k", {"name": EXPLICIT, "key": 0.5, "rate": 0.2}), seeds=1)
    (trial,) = other.chosen(["k"])
    _, began, _ = run(other, tmp_path)
    assert trial.id in began
    ours, theirs = RunStore(tmp_path / trial.id).final(), RunStore(folder / trial.id).final()
    assert ours is not None
    assert theirs is not None
    assert ours["last_weights"] == theirs["last_weights"]


def test_what_is_recorded_is_taken_over_later(ran: Any, tmp_path: Path) -> None:
    first = plan_of(("q", {"name": EXPLICIT, "query": 0.5}), seeds=1)
    run(first, tmp_path)
    both = plan_of(
        ("k", {"name": EXPLICIT, "key": 0.5}), ("q", {"name": EXPLICIT, "query": 0.5}), seeds=1
    )
    result, began, _ = run(both, tmp_path)
    assert not began
    assert {e.summary.n for e in result.table.entries} == {1}


def test_only_the_papers_form_agrees() -> None:
    def training(**terms: Any) -> str:
        return training_of(
            plan_of(("row", {"name": EXPLICIT, **terms}), seeds=1).chosen(["row"])[0]
        )

    assert training(query=0.5) == training(key=0.5, form="paper")
    assert training(query=0.5, form="exact") != training(key=0.5, form="exact")
    assert training(query=0.5) != training(key=0.4)
    assert training(query=0.5, key=0.1) != training(key=0.5, query=0.2)
    assert training(query=0.5, value=0.1) == training(key=0.5, value=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"heads": "concat"}, {"visible_only": True}, {"reduction": "author"}]
)
def test_canonical_arguments_compute_the_same(options: dict[str, Any]) -> None:
    """The claim itself, on values and gradients, for every option that a canonical spelling passes by."""

    def step(**terms: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = dampen.models.ViT(
            image_size=8, channels=1, classes=4, patch_size=4, width=8, depth=2, heads=2, mlp=8
        )
        reg = dampen.regularize(model.train(), dampen.ExplicitDropout(**terms, **options))
        loss, _ = reg.loss(lambda: model(torch.randn(3, 1, 8, 8)), lambda out: out.square().mean())
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    arguments = {"key": 0.5, "value": 0.1}
    ours, gradients = step(**arguments)
    theirs, others = step(**dampen.ExplicitDropout.canonical(arguments))
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, gradients, others))
    assert len(gradients) == len(others)


@pytest.fixture
def half(ran: Any, tmp_path: Path) -> tuple[Comparison, RunStore, RunStore]:
    """A study of which the first of two twins is recorded: the plan, its record and that of the other."""
    plan = plan_of(
        ("q", {"name": EXPLICIT, "query": 0.5}), ("k", {"name": EXPLICIT, "key": 0.5}), seeds=1
    )
    q, k = (RunStore(tmp_path / plan.configs[i].settings[0].ids["0"]) for i in (1, 2))
    shutil.copytree(ran[1] / ran[0].configs[1].settings[0].ids["0"], q.folder)
    assert q.final() is not None
    return plan, q, k


def rewrite(record: RunStore, **changes: Any) -> None:
    final = record.final()
    assert final is not None
    record.finish(final | changes)


def test_a_record_without_environment_is_taken_over(half: Any, tmp_path: Path) -> None:
    plan, q, k = half
    (q.folder / "environment.json").unlink()
    result, began, _ = run(plan, tmp_path, "k")
    assert not began
    assert result.outcomes[k.folder.name].status == "finished"


def test_a_damaged_source_or_a_lock_costs_that_trial_alone(half: Any, tmp_path: Path) -> None:
    plan, q, k = half
    with locked(k.folder):
        result, _, told = run(plan, tmp_path, "k")
    assert (result.outcomes[k.folder.name].status, result.exit_code) == ("locked", 4)
    assert told[0]["status"] == "locked"
    (q.folder / "log.jsonl").write_text("no line\n")
    result, _, _ = run(plan, tmp_path, "k")
    assert result.outcomes[k.folder.name].status == "failed"
    assert "log.jsonl is damaged" in result.messages()[0]
    assert result.table.entries


def test_retry_does_not_take_over_what_diverged(half: Any, tmp_path: Path) -> None:
    plan, q, k = half
    rewrite(q, status="diverged", reason="the loss was nan")
    result, began, _ = run(plan, tmp_path, "k", retry=True)
    assert began == [k.folder.name]
    assert result.outcomes[k.folder.name].status == "finished"


def test_other_kernels_are_another_training(half: Any, tmp_path: Path) -> None:
    plan, q, k = half
    rewrite(q, kernels="torch" if library.path() == "native" else "native")
    assert run(plan, tmp_path, "k")[1] == [k.folder.name]


def test_the_data_of_a_source_is_checked(half: Any, tmp_path: Path) -> None:
    plan, q, k = half
    final = q.final()
    hashes = dict.fromkeys(final["data"]["sha256"], "0" * 64)
    rewrite(q, data=final["data"] | {"sha256": hashes})
    with pytest.raises(DamagedData, match="has changed since 1 trial"):
        run(plan, tmp_path, "k")
    assert not k.done
