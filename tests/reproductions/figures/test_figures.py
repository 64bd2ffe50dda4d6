"""The figures that the papers' pages add to the report, on invented numbers."""

import json
import re
import statistics

import pytest

import reproductions  # noqa: F401  (registers the figures)
from dampen.extensions import references
from dampen.studies.plugins import Palette
from dampen.studies.report import make_report
from dampen.studies.store import RunStore
from reproductions.figures.attention_maps import attention_maps
from reproductions.figures.conditioning import conditioning, conditioning_over_training
from reproductions.figures.grid import grid, matrix
from tests.studies.synthetic_runs import write_study


def add_conditions(folder, plan):
    """Write invented condition numbers into the logs: ln kappa is 10 layer + seed + step / 100."""
    for row in plan.configs:
        for point in row.settings:
            for seed, trial in point.ids.items():
                lines = RunStore(folder / trial).lines()
                for line in lines[:2]:
                    layers = [
                        {
                            "name": f"blocks.{i}",
                            "attention": {
                                "n": 4,
                                "log_mean": 10 * i + int(seed) + line["step"] / 100,
                            },
                        }
                        for i in range(2)
                    ]
                    line["conditioning"] = [{"step": line["step"], "layers": layers}]
                (folder / trial / "log.jsonl").write_text(
                    "".join(json.dumps(line) + "\n" for line in lines)
                )


def test_figure_is_there_only_where_it_was_measured(tmp_path):
    plan = write_study(tmp_path)
    palette = Palette([row.name for row in plan.configs])
    assert conditioning_over_training(make_report([tmp_path]).tables[0], palette) is None
    add_conditions(tmp_path, plan)
    report = make_report([tmp_path])
    figure = conditioning_over_training(report.tables[0], palette)
    assert [panel.title for panel in figure.panels] == ["attention output, without the skip"]
    seeds = [int(s) for s in plan.configs[0].settings[0].ids]
    first = next(r for r in figure.records if r["layer"] == 1 and r["step"] == 40)
    assert first["mean"] == pytest.approx(statistics.fmean(seeds) + 0.4)
    assert first["n"] == len(seeds)
    assert {r["layer"] for r in figure.records} == {1, 2}
    assert "Conditioning over training" in report.render("html")


def test_a_grid_is_a_heat_map_with_the_selected_point(tmp_path):
    axes = {"lambda": [1e-4, 1e-3], "train.lr": [1e-4, 5e-4]}
    rows = {
        n: ([{"name": "explicit_dropout", n: "$lambda"}], 0.0, 1.0, None) for n in ("key", "value")
    }
    write_study(tmp_path, rows, grid=axes, report="all", seeds=3)
    report = make_report([tmp_path])
    (table,) = report.tables
    found = matrix(table)
    assert (found.y, found.x, found.rows()) == ("lambda", "lr", ["key", "value"])
    assert found.across == ["0.0001", "0.0005"]
    assert sum(r["chosen"] for r in found.records) == 2
    assert len(grid(table, Palette([e.name for e in table.entries])).panels) == 2
    assert "lambda x lr" in report.render("html")
    markdown = report.render("md")
    assert "| lambda \\ lr | 0.0001 | 0.0005 |" in markdown
    assert markdown.count("| 0.001 | ") == 2
    assert len(re.findall(r"\*\*\d\d\.\d\d ± ", markdown)) == 2  # the selected point of each row


def test_what_was_diagnosed_is_drawn(tmp_path):
    write_study(tmp_path, diagnose=True)
    (table,) = make_report([tmp_path]).tables
    palette = Palette([e.name for e in table.entries])
    assert len(conditioning(table, palette).panels) >= 1
    images = attention_maps(table, palette).images
    assert all(image["png"].startswith("data:image/png;base64,") for image in images)


def test_figures_of_a_plugin_are_registered_by_name():
    assert references("dampen.figures")["grid"] == "reproductions.figures.grid:grid"


def test_a_page_says_which_plugin_is_missing_and_loads_none(tmp_path):
    write_study(tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    content["header"]["plugins"] = ["reproductions", "figures_of_a_stranger"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    (tmp_path / "figures_of_a_stranger.py").write_text("raise SystemExit")
    page = make_report([tmp_path]).render("html")
    assert "plug-in figures_of_a_stranger, which is not loaded" in page
    assert "Set DAMPEN_PLUGINS=figures_of_a_stranger to add them" in page
