"""The gradient's variance during training: equal to a loop, unnoticed by training, through interruptions."""

import pytest
import torch

from dampen.studies.errors import ConfigError, Interrupted
from dampen.studies.report import make_report
from dampen.studies.report.figures import Palette
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.data import derive
from dampen.studies.trainer.state import BATCHES, TrialState, measure_variance, over_training
from dampen.studies.trainer.train import run_trial
from reproductions.figures.gradient_variance import gradient_variance
from tests.studies.synthetic_runs import write_study

METHODS = [
    {"name": "drop_key", "rate": 0.2},
    {"name": "explicit_dropout", "value": 0.1},
    {"name": "r_drop", "weight": 0.5},
]


def variances(folder):
    return [measured for line in RunStore(folder).lines() for measured in line.get("variance", [])]


def test_equals_a_loop_over_batches(small, quick):
    """Plain model: stacked gradients, their covariance's trace by torch.var."""
    s = TrialState(small(), quick)
    s.model.train()
    seed = derive(0, "variance")
    found = measure_variance(s, seed)
    order = torch.randperm(len(s.data.train), generator=torch.Generator().manual_seed(seed))
    rows = []
    for i in range(min(BATCHES, len(order) // 32)):
        batch = s.data.train.batch(order[32 * i : 32 * (i + 1)])
        loss = torch.nn.functional.cross_entropy(s.raw(*batch["inputs"]), batch["target"])
        rows.append(
            torch.cat(
                [g.flatten().double() for g in torch.autograd.grad(loss, list(s.raw.parameters()))]
            )
        )
    stacked = torch.stack(rows)
    assert found["trace"] == pytest.approx(stacked.var(0).sum().item(), rel=1e-5)
    assert found["mean_squared_norm"] == pytest.approx(
        stacked.square().sum(1).mean().item(), rel=1e-5
    )
    assert found["normalized"] == pytest.approx(found["trace"] / found["mean_squared_norm"])


def test_measured_every_k_steps_and_training_does_not_notice(tmp_path, small, quick):
    plain = run_trial(small(METHODS), tmp_path / "plain", quick)
    watched = run_trial(small(METHODS, variance_every=4), tmp_path / "watched", quick)
    assert plain["last_weights"] == watched["last_weights"]
    found = variances(tmp_path / "watched")
    assert [v["step"] for v in found] == [0, 4, 8, 12]
    assert len({v["trace"] for v in found}) == 4
    assert watched["variance"] == {
        "n": 4,
        **{
            k: pytest.approx(sum(v[k] for v in found) / 4)
            for k in ("trace", "normalized", "mean_squared_norm")
        },
    }
    assert "variance" not in plain
    assert over_training([]) is None


def test_what_was_not_finite_is_left_out_of_the_mean():
    """A log has null for infinite values."""
    kinds = ("trace", "normalized", "mean_squared_norm")
    first, second = dict.fromkeys(kinds, 2.0), dict.fromkeys(kinds, 4.0)
    found = over_training(
        [{"variance": [{**first, "trace": None, "normalized": None}, {**second, "trace": None}]}]
    )
    assert found == {"n": 2, "trace": None, "normalized": 4.0, "mean_squared_norm": 3.0}


def test_measurements_survive_an_interruption(tmp_path, small, quick):
    trial = small(METHODS, variance_every=2)
    whole = run_trial(trial, tmp_path / "whole", quick)
    seen = {"step": -1}
    with pytest.raises(Interrupted):
        run_trial(
            trial,
            tmp_path / "cut",
            quick,
            lambda e: seen.update(step=e.get("step", -1)),
            lambda: seen["step"] == 5,
        )
    assert run_trial(trial, tmp_path / "cut", quick)["variance"] == whole["variance"]
    assert variances(tmp_path / "cut") == variances(tmp_path / "whole")


def test_what_is_refused_and_that_old_ids_stay(small, quick):
    with pytest.raises(ConfigError, match="variance_every: must be 1 or more"):
        small(variance_every=0)
    with pytest.raises(ConfigError, match="on one device"):
        small(variance_every=2, accumulate=2)
    assert small(variance_every=None).id == small().id != small(variance_every=2).id
    few = Run.from_dict(
        small(variance_every=2).to_dict() | {"data": {"name": "digits", "limit": 60}}
    )
    with pytest.raises(ConfigError, match="two batches are needed"):
        measure_variance(TrialState(few, quick), 0)


def test_table_and_figure_have_it(tmp_path):
    """Invented numbers: the second row's variance is 0.8 of the reference's, seed by seed."""
    plan = write_study(tmp_path)
    for i, row in enumerate(plan.configs):
        for point in row.settings:
            for seed, trial in point.ids.items():
                record = RunStore(tmp_path / trial)
                if (final := record.final()) is None or final["status"] != "finished":
                    continue
                trace = (1 + int(seed)) * (0.8 if i else 1.0)
                (tmp_path / trial / "final.json").unlink()
                record.finish(final | {"variance": {"n": 2, "trace": trace, "normalized": 0.5}})
                lines = [
                    line | {"variance": [{"step": line["step"], "trace": trace}]}
                    for line in record.lines()
                ]
                record.write_lines(lines)
    report = make_report([tmp_path])
    table = report.tables[0]
    others = [e for e in table.entries if e.reference and e.values]
    assert others
    for entry in others:
        assert list(entry.by_seed["variance_ratio"].values()) == pytest.approx(
            [0.8] * len(entry.values)
        )
        assert entry.secondary["training_variance"].difference < 0
    figure = gradient_variance(table, Palette([row.name for row in plan.configs]))
    assert {r["row"] for r in figure.records} >= {e.name for e in others}
    assert "Gradient variance over training" in report.render("html")
