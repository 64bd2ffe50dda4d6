"""The report's figure of condition numbers over training, from logs with invented numbers."""

import json
import statistics

import pytest

from dampen.studies.records.record import RunStore
from dampen.studies.report import make_report
from dampen.studies.report.conditioning import conditioning_figure
from dampen.studies.report.figures import Palette
from tests.studies.synthetic_runs import write_study


def add_conditions(folder, plan):
    """Write invented condition numbers into the logs: ln kappa is 10 layer + seed + step / 100."""
    for row in plan.rows:
        for point in row.points:
            for seed, trial in point.trials.items():
                lines = RunStore(folder / trial).lines()
                for line in lines[:2]:
                    layers = [
                        {
                            "name": f"blocks.{i}",
                            "attention": {"n": 4, "log_mean": 10 * i + int(seed) + line["step"] / 100},
                        }
                        for i in range(2)
                    ]
                    line["conditioning"] = [{"step": line["step"], "layers": layers}]
                (folder / trial / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_figure_is_there_only_where_it_was_measured(tmp_path):
    plan = write_study(tmp_path)
    palette = Palette([row.name for row in plan.rows])
    assert conditioning_figure(make_report([tmp_path]).tables[0], palette) is None
    add_conditions(tmp_path, plan)
    report = make_report([tmp_path])
    figure = conditioning_figure(report.tables[0], palette)
    assert [panel.title for panel in figure.panels] == ["attention output, without the skip"]
    seeds = [int(s) for s in plan.rows[0].points[0].trials]
    first = next(r for r in figure.records if r["layer"] == 1 and r["step"] == 40)
    assert first["mean"] == pytest.approx(statistics.fmean(seeds) + 0.4)
    assert first["n"] == len(seeds)
    assert {r["layer"] for r in figure.records} == {1, 2}
    assert "Conditioning over training" in report.render("html")
