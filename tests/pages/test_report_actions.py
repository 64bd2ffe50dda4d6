"""What a reader can do on the report: open, filter, export, explain, compare; and what axe finds."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dampen.studies.report import make_report, write_report
from dampen.studies.report.charts import VERDICTS, _front, _labels, forest
from dampen.studies.report.figures import Palette
from dampen.studies.report.page import card_svg, card_text, matrix_view
from dampen.studies.report.summary import advise
from tests.browser import Browser
from tests.studies.synthetic_runs import write_study

DONE = "document.documentElement.dataset.charts === 'done'"
ROWS = {
    "plain": ([], 0.0, 1.0, None),
    "drop_key(rate=0.3)": ([{"name": "drop_key", "rate": 0.3}], 0.004, 1.05, None),
    "drop_path": ([{"name": "drop_path"}], 0.018, 1.01, None),
    "r_drop + a_method_with_a_long_name": ([{"name": "r_drop"}], 0.022, 1.94, None),
    "blurred_attention": ([{"name": "blurred_attention"}], -0.015, 1.02, None),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actions") / "one"
    plan = write_study(folder, ROWS, seeds=8, departures=())
    plan.header["command"] = "dampen compare train.py:train --methods drop_key"
    plan.save(folder)
    (first, *_) = folder.glob("*/final.json")
    (first.parent / "output.txt").write_text("printed by the training\n")
    return make_report([folder]).tables[0]


@pytest.fixture(scope="module")
def page(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([table.study.runs()[0].folder.parent], path, title="A title of my own")
    browser = Browser()
    page = browser.page(1280, 900)
    page.open(path, DONE)
    yield page
    browser.close()


def test_verdicts_have_colors_and_shapes(table):
    figure = forest(table, Palette([e.name for e in table.entries]))
    text = json.dumps(figure.panels[0].spec)
    kinds = {e.verdict for e in table.entries if e.comparison}
    assert {"better", "worse"} < kinds
    for kind in kinds:
        assert all(look in text for look in VERDICTS[kind]), kind
    assert len({VERDICTS[k][0] for k in ("better", "worse", "inconclusive")}) == 3
    assert len({look[1] for look in VERDICTS.values()}) == len(VERDICTS)


def test_the_frontier_joins_only_costs_that_differ(table):
    names = [e.name for e in _front(table.ranked(), "max")]
    assert names[-1] == table.ranked()[0].name
    costs = [table.entry(n).cost for n in names]
    for one, two in pairwise(costs):
        assert two.interval[0] > one.interval[1]


def test_names_beside_points_do_not_overlap(table):
    """Each has a height of its own, also where intervals are much longer than the means differ."""
    shown = [
        {"row": e.name, "ratio": e.cost.ratio, "mean": e.summary.mean, "low": 0.0, "high": 100.0}
        for e in table.ranked()
    ]
    heights = sorted(r["at"] for _, _, side in _labels(shown) for r in side)
    assert len(heights) == len(shown)
    assert (
        min(b - a for a, b in pairwise(heights)) > 4.9
    )  # of 100: a line of text in a chart of 420 pixels


def test_all_pairs_agree_with_themselves(table):
    matrix = matrix_view(table)
    for i, row in enumerate(matrix["rows"]):
        assert row["cells"][i]["text"] == ""
        for j, cell in enumerate(row["cells"]):
            other = matrix["rows"][j]["cells"][i]
            if i != j:
                assert float(cell["text"]) == -float(other["text"])
                assert {cell["mark"], other["mark"]} in ({"▲", "▼"}, {"="}, {""})


def test_the_card_is_one_line_of_numbers(table):
    advice = advise(table)
    c = table.entry(advice.pick).comparison
    text = f"{advice.pick} {c.difference:+.2f} ({c.low:.2f} to {c.high:.2f}), 8 seeds"
    assert card_text(table, advice) == text
    svg = card_svg(table, advice)
    assert svg.startswith("<svg")
    assert f"{c.difference:+.2f}" in svg


@pytest.mark.slow
def test_the_page_loads_and_has_its_title(page):
    assert page.complaints() == []
    assert page.run("document.title") == "A title of my own"
    assert "dampen.regularize(model, " in page.run("document.querySelector('.card').textContent")


@pytest.mark.slow
def test_axe_finds_nothing(page):
    """On the page with everything open, light and dark."""
    import axe_core_python

    page.run((Path(axe_core_python.__file__).parent / "axe.min.js").read_text() + "; 1")
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; }); 1")
    page.click("[data-table] button.open")
    for dark in (False, True):
        page.media(dark=dark)
        found = page.run(
            "axe.run(document).then(r => r.violations.map(v => [v.id, v.nodes[0].html]))"
        )
        assert found == []
    page.media()


@pytest.mark.slow
def test_a_click_on_a_method_opens_its_seeds_log_folder_and_command(page, table):
    best = table.ranked()[0]
    page.click("[data-table] button.open")
    text = page.run("document.querySelector('.opened').textContent")
    for words in (best.name, "weight=1.0", "dampen.RDrop()", "dampen compare train.py:train"):
        assert words in text
    folders = [str(run.folder) for run in best.setting.logged.values()]
    assert all(folder in text for folder in folders)
    everything = page.run("document.getElementById('data').textContent")
    assert "printed by the training" in everything
    page.click(".opened .tools button")
    chosen = "[...document.querySelectorAll('[data-picker] input:checked')].map(b => b.value)"
    assert page.run(chosen) == [best.name, "plain"]
    page.click("[data-picker] [data-set=all]")


@pytest.mark.slow
def test_verdicts_filter_and_columns_are_chosen(page):
    visible = (
        "[...document.querySelectorAll('[data-table] tbody tr')].filter(r => r.offsetParent).length"
    )
    before = page.run(visible)
    page.run("document.querySelectorAll('.view details').forEach(d => { d.open = true; }); 1")
    page.click(".view details:first-child label:first-child input")
    assert page.run(visible) < before
    page.click(".view details:first-child label:first-child input")
    assert page.run(visible) == before
    page.click(".view details:nth-child(2) label:nth-child(3) input")
    hidden = (
        "[...document.querySelectorAll('[data-table] td.settings')].every(c => !c.offsetParent)"
    )
    assert page.run(hidden)
    page.click(".view details:nth-child(2) label:nth-child(3) input")
    means = "[...document.querySelectorAll('[data-table] tbody tr')].map(r => Number(r.cells[4].dataset.v))"
    assert page.run(means) == sorted(page.run(means), reverse=True)


@pytest.mark.slow
def test_explanations_open_by_click_and_key_and_close_by_escape(page):
    page.click("th button.help")
    assert "baseline" in page.run("document.getElementById('help').textContent")
    assert (
        page.run("document.querySelector('th button.help').getAttribute('aria-expanded')") == "true"
    )
    page.press("Escape", 27)
    assert page.run("document.getElementById('help').hidden")
    page.run("document.querySelector('th button.help').focus(); 1")
    page.press("Enter", 13)
    assert not page.run("document.getElementById('help').hidden")
    page.press("Escape", 27)


@pytest.mark.slow
def test_exports_hold_the_table(page, table):
    exports = page.run("JSON.parse(document.getElementById('data').textContent).exports.t1")
    assert list(exports) == ["CSV", "Card (SVG)", "LaTeX", "Markdown"]
    for label, start in (("CSV", "table,row"), ("Markdown", "## "), ("LaTeX", "% needs")):
        assert exports[label][1].startswith(start)
    assert (
        len(page.run("[...document.querySelectorAll('.exports button')].map(b => b.textContent)"))
        == 4
    )
    assert page.run("document.querySelectorAll('button.svg').length") == page.run(
        "document.querySelectorAll('.chart').length"
    )


@pytest.mark.slow
def test_single_seeds_are_drawn_on_demand(page):
    lines = "document.querySelectorAll('[data-figure=t1-curves] svg path').length"
    before = page.run(lines)
    page.click("[data-seeds=t1-curves]")
    page.wait(f"{lines} > {before}")
    page.click("[data-seeds=t1-curves]")
    page.wait(f"{lines} === {before}")
    text = page.run("document.getElementById('t1-curves').textContent")
    assert "training step" in text
    assert "Dashed: training" in text


@pytest.mark.slow
def test_two_methods_show_the_settings_that_differ(page):
    page.run("document.querySelector('details.pair').open = true; 1")
    page.wait("document.querySelectorAll('details.pair table').length === 2")
    text = page.run("document.querySelectorAll('details.pair table')[1].textContent")
    assert "methods" in text


@pytest.mark.slow
def test_names_stand_beside_the_plot_on_a_phone(page):
    """No name of a method reaches into the plot's area."""
    page.resize(500, 900)
    page.run("window.dispatchEvent(new Event('resize')); location.reload(); 1")
    page.wait(DONE)
    over = """[...document.querySelectorAll('[data-figure=t1-forest] svg')].flatMap(svg => {
      const grid = svg.querySelector('.role-axis-grid').getBoundingClientRect();
      return [...svg.querySelectorAll('.role-axis-label text')]
        .filter(t => /[a-z]_/.test(t.textContent))
        .filter(t => t.getBoundingClientRect().right > grid.left + 1).map(t => t.textContent);
    })"""
    assert page.run(over) == []
    assert page.run("document.documentElement.scrollWidth") <= 500
    beyond = """[...document.querySelectorAll('[data-table] button.open')].filter(b =>
      b.getBoundingClientRect().right > b.closest('th').getBoundingClientRect().right).map(b => b.textContent)"""
    assert page.run(beyond) == []  # nor into the next column of the table
    rules = "document.querySelectorAll('[data-figure=t1-cost] svg .mark-rule line').length"
    assert page.run(rules) >= len(ROWS)  # intervals stay where names have no room
    page.resize(1280, 900)
