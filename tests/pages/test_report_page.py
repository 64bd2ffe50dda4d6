"""The report in a real browser: what people see, click, print and hear; all runs here are synthetic."""

import itertools
import json
import threading
import time

import pytest

import reproductions  # noqa: F401  (its figures are part of the page that is tested here)
from dampen.studies.report import make_report, write_report
from tests.browser import Browser
from tests.studies.synthetic_runs import ROWS, big_study, write, write_study

DONE = "document.documentElement.dataset.charts === 'done'"
ATTACK = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>\'"></script><svg onload=window.hurt=1>'

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two tables with everything that a page can show."""
    folder = tmp_path_factory.mktemp("report")
    write_study(folder / "runs" / "one", diagnose=True)
    grid = {"lambda": [1e-4, 1e-3], "train.lr": [1e-4, 5e-4]}
    rows = {
        n: ([{"name": "explicit_dropout", n: "$lambda"}], 0.0, 1.0, None) for n in ("key", "value")
    }
    write_study(folder / "runs" / "two", rows, name="grid", grid=grid, report="all", seeds=2)
    axes = [{"key": "train.lr", "log": True}, {"key": "rate", "log": False}]
    tried = [
        {
            "values": {"train.lr": 0.001 * (i + 1), "rate": 0.1 * i},
            "valid": 0.8 + 0.01 * i,
            "state": "complete",
        }
        for i in range(4)
    ]
    search = {"metric": "accuracy", "trials": 4, "rows": {"plain": {"axes": axes, "trials": tried}}}
    write(folder / "runs" / "one" / "search.json", search)
    (folder / "runs" / "empty").mkdir()
    write_report([folder / "runs"], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(browser, report):
    """One tab for all tests that leave it as it was, apart from the order of a table."""
    page = browser.page()
    page.open(report, DONE)
    yield page
    page.close()


def names(page):
    """The first column of the first table of results, as shown."""
    return page.run(
        "[...document.querySelectorAll('#t1 table[data-most] tbody th')].map(h => h.textContent.trim())"
    )


def test_loads_without_a_complaint_or_a_request(page, report):
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]
    states = page.run("[...document.querySelectorAll('.chart')].map(c => c.dataset.state)")
    assert len(states) > 12
    assert set(states) == {"drawn"}
    assert page.run(
        "[...document.querySelectorAll('.chart svg')].every(s => s.getBoundingClientRect().width > 60)"
    )


def test_every_kind_of_figure_is_there(page):
    found = page.run(
        "[...document.querySelectorAll('figure')].map(f => f.id.replace(/^t\\d+-/, ''))"
    )
    wanted = {
        "forest",
        "results",
        "cost",
        "curves",
        "loss",
        "grid",
        "calibration",
        "attacks",
        "corruptions",
    }
    assert wanted | {"conditioning", "attention", "heads", "search"} == set(found)
    assert page.run("document.querySelector('#t1 .card .headline').textContent") == "Use Explicit v"
    assert "empty folder" in page.run(
        "document.getElementById('skipped').parentElement.textContent"
    )


def test_sorting_by_mouse_and_by_keyboard(page):
    at_first = names(page)
    assert at_first[-1].startswith("Blur")  # best first
    head = "#t1 table[data-most] thead th"
    page.click(f"{head}:nth-child(1) button")
    assert names(page) == sorted(at_first, key=str.lower)
    assert page.run(f"document.querySelector('{head}').getAttribute('aria-sort')") == "ascending"
    assert "Sorted by Method, ascending" in page.run(
        "document.getElementById('announce').textContent"
    )
    page.run(f"document.querySelector('{head}:nth-child(5) button').focus()")
    page.press("Enter", 13)
    assert names(page) == at_first
    page.press("Enter", 13)
    assert names(page) == at_first[::-1]
    assert page.run(f"document.querySelector('{head}').hasAttribute('aria-sort')") is False
    page.run(
        f"[...document.querySelectorAll('{head} button')].find(b => b.textContent === 'Cost').click()"
    )
    ratios = "[...document.querySelectorAll('#t1 table[data-most] td[title$=step]')].map(c => Number(c.dataset.v))"
    found = page.run(ratios)
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5


def ground(page):
    return page.run("getComputedStyle(document.body).backgroundColor")


def test_themes(browser, report):
    page = browser.page()
    page.open(report)
    page.press("Tab", 9)  # the first stop is a way past the header
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left >= 0")
    light = ground(page)
    assert page.run("document.getElementById('theme').textContent") == "Theme: system"
    page.wait("document.querySelector('#t1-cost svg')")
    page.click("#theme")
    assert ground(page) == light
    page.click("#theme")
    assert page.run("document.getElementById('theme').textContent") == "Theme: dark"
    assert ground(page) != light
    page.wait(
        "document.querySelector('#t1-cost svg').outerHTML.includes('#a9b1bd')"
    )  # the reference's gray, lighter
    page.open(report)
    assert ground(page) != light  # remembered
    page.run("localStorage.clear()")
    page.media(dark=True)
    page.open(report)
    assert page.run("document.getElementById('theme').textContent") == "Theme: system"
    assert ground(page) != light
    assert page.complaints() == []
    page.close()


def test_every_chart_has_its_numbers(page, report):
    count = page.run("document.querySelectorAll('figure').length")
    assert page.run("document.querySelectorAll('details.numbers').length") == count
    page.run("document.querySelectorAll('details.numbers').forEach(d => { d.open = true; })")
    page.wait(
        "[...document.querySelectorAll('details.numbers')].every(d => d.querySelector('tbody td'))"
    )
    rows = "[...document.querySelectorAll('#t1-results details tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    shown = page.run(rows)
    ranked = make_report([report.parent / "runs" / "one"]).tables[0].ranked()
    assert [(r[0], r[1], r[2]) for r in shown] == [
        (e.name, f"{e.summary.mean:.2f}", f"{e.summary.sd:.2f}") for e in ranked
    ]
    assert page.complaints() == []


def test_every_run_can_be_found(page):
    page.run("document.querySelector('details.runs').open = true")
    page.wait("document.querySelector('details.runs tbody td')")
    assert page.run("document.querySelectorAll('details.runs tbody tr').length") == 30
    field = "document.querySelector('details.runs input')"
    page.run(f"{field}.value = 'blur'; {field}.dispatchEvent(new Event('input'))")
    assert page.run("document.querySelectorAll('details.runs tbody tr').length") == 5


def test_numbers_can_be_saved(page, tmp_path):
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.browser.send("Browser.setDownloadBehavior", folder)
    page.run("document.querySelector('#t1-results details').open = true")
    page.wait("document.querySelector('#t1-results .tools button')")
    page.click("#t1-results .tools button")
    deadline = time.monotonic() + 30
    while not (files := list(tmp_path.glob("*.csv"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert files[0].read_text().startswith("Method,Mean,SD")


def test_readable_on_a_phone(browser, report):
    page = browser.page(width=390, height=844)
    page.open(report, DONE)
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    small = """[...document.querySelectorAll('main :not(svg *)')].filter(n =>
        [...n.childNodes].some(c => c.nodeType === 3 && c.textContent.trim())
        && n.getClientRects().length && parseFloat(getComputedStyle(n).fontSize) < 11).length"""
    assert page.run(small) == 0
    assert page.run(
        "[...document.querySelectorAll('.chart')].every(c => c.getBoundingClientRect().right <= innerWidth)"
    )
    assert page.complaints() == []
    page.close()


LAYOUT = """(() => {
  const visible = (n) => n.getClientRects().length > 0;
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const charts = [...document.querySelectorAll('.chart')].filter(visible);
  const marks = ['symbol path', 'rect path', 'line path', 'rule line'].map((m) => `svg .mark-${m}`).join(', ');
  const blank = charts.filter((c) => !c.querySelector(marks));
  const width = (n) => n.getBoundingClientRect().width;
  const out = charts.filter((c) => width(c.querySelector('svg')) > width(c) + 1);
  const names = [...document.querySelectorAll('table[data-most] tbody th .name > span:last-child')].filter(visible);
  const words = names.filter((n) => {  // no word of a name is wider than its place
    const range = document.createRange();
    range.selectNodeContents(n);
    return range.getBoundingClientRect().right > n.closest('th').getBoundingClientRect().right + 1;
  });
  const wider = [...document.querySelectorAll('.scroll')].filter((s) => s.scrollWidth > s.clientWidth + 2);
  const cut = wider.filter((s) => !s.classList.contains('cut'));
  const titles = [...document.querySelectorAll('table[data-most] thead th')].filter(visible);
  const heads = titles.filter((h) => !h.textContent.trim());
  const found = { blank, out, words, cut, heads, charts };
  return { wide, ...Object.fromEntries(Object.entries(found).map(([k, v]) => [k, v.length])) };
})()"""


@pytest.mark.parametrize(
    ("width", "dark"), [(390, False), (768, True), (1440, False), (1920, True)]
)
def test_layout(browser, report, width, dark):
    """No overflow, no cut text, no blank chart, and a table that is wider than its place says so."""
    page = browser.page(width=width, height=900)
    page.media(dark=dark)
    page.open(report, DONE)
    found = page.run(LAYOUT)
    assert found.pop("charts") > 12
    assert found == {"wide": 0, "blank": 0, "out": 0, "words": 0, "cut": 0, "heads": 0}
    page.media(kind="print", dark=False)
    found = page.run(LAYOUT)
    assert (found["blank"], found["words"], found["heads"]) == (0, 0, 0)
    page.close()


def test_a_phone_shows_name_verdict_and_cost_without_scrolling(browser, report):
    page = browser.page(width=390, height=844)
    page.open(report, DONE)
    rows = "[...document.querySelectorAll('#t1 table[data-most] tbody tr')]"
    assert max(page.run(f"{rows}.map(r => r.cells[2].getBoundingClientRect().right)")) <= 390
    titles = page.run(
        "[...document.querySelectorAll('#t1 table[data-most] thead th')].map(h => h.textContent.trim())"
    )
    assert titles[:3] == ["Method", "Verdict", "Cost"]
    page.close()


def test_the_picker_drives_the_charts_and_not_the_differences(browser, report):
    page = browser.page()
    page.open(report, DONE)
    lines = "document.querySelectorAll('#t1-curves .mark-line path').length"
    rows = "document.querySelectorAll('#t1-forest .role-mark.mark-symbol path').length"
    assert (page.run(lines), page.run(rows)) == (6, 5)
    page.click("#t1 [data-picker] [data-set=none]")
    page.wait(f"{lines} === 1")
    assert page.run(rows) == 5
    page.run("document.querySelector('#t1 [data-picker] input[value=Blur]').click()")
    page.wait(f"{lines} === 2")
    assert "2 of 6 methods chosen" in page.run(
        "document.querySelector('#t1 .picker .count').textContent"
    )
    field = "document.querySelector('#t1 [data-picker] [type=search]')"
    page.run(f"{field}.value = 'drop'; {field}.dispatchEvent(new Event('input'))")
    assert (
        page.run("[...document.querySelectorAll('#t1 .chips label')].filter(l => !l.hidden).length")
        == 3
    )
    before = page.run("document.querySelector('#t1-curves .mark-line path').getAttribute('d')")
    slider = "document.querySelector('[data-smooth=t1-curves]')"
    page.run(f"{slider}.value = '0.8'; {slider}.dispatchEvent(new Event('input'))")
    page.wait(
        f"document.querySelector('#t1-curves .mark-line path').getAttribute('d') !== {json.dumps(before)}"
    )
    assert page.complaints() == []
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_names_of_rows_are_whole_in_charts(browser, report, width):
    """Every name stands unbroken at its row, or (beside points, on a phone) in the legend; none leaves its chart."""
    page = browser.page(width=width)
    page.open(report, DONE)
    texts = """[...document.querySelectorAll('#t1 .chart')].filter(
        chart => /forest|cost|results/.test(chart.dataset.figure)
    ).map(chart => {
        const all = chart.getBoundingClientRect();
        const inside = (own) => own.left >= all.left - 2 && own.right <= all.right + 2;
        const labels = [...chart.querySelectorAll('svg text')];
        return [chart.dataset.figure, labels.map(t => [t.textContent, inside(t.getBoundingClientRect())])];
    })"""
    found = dict(page.run(texts))
    assert len(found) == 3
    for figure, labels in found.items():
        assert all(inside for _, inside in labels), (figure, labels)
        assert not [text for text, _ in labels if "…" in text], figure
        assert any(text in ROWS for text, _ in labels), figure
    page.close()


def test_two_rows_side_by_side(page, report):
    page.run("document.querySelector('#t1 details.pair').open = true")
    page.wait("document.querySelector('#t1 details.pair tbody td')")
    table = make_report([report.parent / "runs" / "one"]).tables[0]
    first, second = table.ranked()[:2]
    cells = page.run("[...document.querySelectorAll('#t1 details.pair tbody tr')][0].textContent")
    both = [first.values[s] - second.values[s] for s in first.values]
    assert f"{sum(both) / len(both):.2f}" in cells
    seed = "document.querySelectorAll('#t1 details.pair select')[2]"
    page.run(f"{seed}.value = '3'; {seed}.dispatchEvent(new Event('change'))")
    cells = page.run("[...document.querySelectorAll('#t1 details.pair tbody tr')][0].textContent")
    assert f"{first.values['3'] - second.values['3']:.2f}" in cells


def test_ten_thousand_rows_open_in_seconds(browser, tmp_path):
    from dampen.studies.report.page import make_page
    from dampen.studies.table import make_table

    began = time.process_time()
    table = make_table(big_study(10_000))
    (tmp_path / "big.html").write_text(make_page([table], []))
    spent = time.process_time() - began
    page = browser.page()
    page.open(tmp_path / "big.html", "document.querySelector('#t1-forest svg')")
    loaded = float(page.run("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    print(
        f"10,000 synthetic rows: made in {spent:.1f} s of processor time, loaded in {loaded:.0f} ms"
    )
    assert spent < 60
    assert loaded < 20_000  # on a busy machine
    assert page.run("document.querySelectorAll('*').length") < 20_000
    page.run("document.querySelector('details.allrows').open = true")
    page.wait("document.querySelector('details.allrows tbody td')")
    assert "1 to 100 of 10000" in page.run(
        "document.querySelector('details.allrows .tools').textContent"
    )
    page.close()


def test_prints_without_controls(browser, report):
    page = browser.page()
    page.open(report, DONE)
    page.resize(720, 1000)  # about what a sheet of paper has between its margins
    page.media(kind="print")
    heads = "[...document.querySelectorAll('table.sortable thead th')]"
    said = page.run(f"{heads}.map(h => [h.dataset.title, getComputedStyle(h, '::before').content])")
    assert said, "no table has headers"
    assert all(content == f'"{title}"' and title for title, content in said), (
        "words are repeated, buttons are not"
    )
    wide = "t => t.getBoundingClientRect().right - document.querySelector('.cards').getBoundingClientRect().right"
    assert (
        page.run(f"Math.max(...[...document.querySelectorAll('table.sortable')].map({wide}))") < 2
    )
    for gone in (".top", "details.block:not([open])", "summary"):
        assert page.run(
            f"[...document.querySelectorAll('{gone}')].every(n => !n.getClientRects().length)"
        ), gone
    assert page.run("document.querySelector('.cards').getClientRects().length") == 1
    pdf = page.send("Page.printToPDF", {"printBackground": True})
    assert len(pdf["data"]) > 20_000
    page.close()


def test_keyboard_and_screen_reader(page):
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.querySelectorAll('h1').length") == 1
    levels = page.run(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))"
    )
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert page.run("[...document.images].every(i => i.alt)")
    assert page.run("[...document.querySelectorAll('th')].every(t => t.scope)")
    assert page.run(
        "[...document.querySelectorAll('table')].every(t => t.caption || t.closest('[aria-label]'))"
    )
    named = "document.getElementById(f.getAttribute('aria-labelledby'))"
    assert page.run(f"[...document.querySelectorAll('figure')].every(f => {named})")
    ids = page.run("[...document.querySelectorAll('[id]')].map(n => n.id)")
    assert len(ids) == len(set(ids))
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    for role in ("button", "link", "image", "figure"):
        nodes = [n for n in tree if n.get("role", {}).get("value") == role and not n.get("ignored")]
        assert nodes, role
        assert all(n.get("name", {}).get("value") for n in nodes), role


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(page, theme):
    page.run(
        f"document.documentElement.dataset.theme = '{theme}'"
    )  # the page itself sets it in the same way

    def value(name):
        text = page.run(
            f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"
        )
        return [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]

    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        high, low = sorted((luminance(value(a)), luminance(value(b))), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ink in ("--ink", "--muted", "--accent"):
        for ground in ("--bg", "--surface", "--pick"):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    for word in ("good", "bad", "caution"):
        assert contrast(f"--{word}", f"--{word}-soft") >= 4.5, word


def test_hostile_names_do_nothing(browser, tmp_path):
    rows = {"plain": ROWS["plain"], ATTACK: ROWS["DropPath"], "{{constructor}}": ROWS["R-Drop"]}
    write_study(
        tmp_path / "runs", rows, title=ATTACK, name=ATTACK, departures=(ATTACK,), diagnose=True
    )
    (tmp_path / "runs" / "<img src=x onerror=window.hurt=1>").mkdir()
    write_report([tmp_path / "runs"], tmp_path / "r.html")
    page = browser.page()
    page.open(tmp_path / "r.html", DONE)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.wait("[...document.querySelectorAll('details.numbers')].every(d => d.querySelector('td'))")
    page.run(
        "document.querySelector('#t1-cost').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    middles = """[...document.querySelectorAll('#t1-cost .mark-symbol path')].map(p => {
        const b = p.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })"""
    for x, y in page.run(middles)[:3]:  # tooltips show the name too
        page.send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    page.wait("document.getElementById('vg-tooltip-element')")
    assert page.run("typeof window.hurt") == "undefined"
    assert page.happened("Page.javascriptDialogOpening") == []
    assert page.complaints() == []
    assert page.requests() == [(tmp_path / "r.html").resolve().as_uri()]
    assert ATTACK in page.run("document.body.textContent")
    assert page.run("document.title") == ATTACK
    page.close()


def test_the_policy_of_the_page_stops_what_escaping_would_miss(browser, report, tmp_path):
    text = report.read_text()
    bad = tmp_path / "bad.html"
    bad.write_text(
        text.replace(
            "<main",
            "<script>window.hurt=1</script><img src='https://example.invalid/x.png'><main",
            1,
        )
    )
    page = browser.page()
    page.open(bad, DONE)
    assert page.run("typeof window.hurt") == "undefined"
    assert len(page.complaints()) >= 2  # the script and the picture were refused
    page.close()


def test_two_thousand_trials_stay_light(browser, tmp_path):
    rows = {"plain": ROWS["plain"]} | {
        f"row {i}": ([{"name": "drop_key", "rate": i / 500}], i / 40000, 1.01, None)
        for i in range(399)
    }
    write_study(tmp_path / "runs", rows, seeds=5, epochs=6)
    made = make_report([tmp_path / "runs"])
    assert sum(e.summary.n for t in made.tables for e in t.entries) == 2000
    text = made.render("html")
    (tmp_path / "r.html").write_text(text)
    assert len(text) < 3_000_000
    page = browser.page()
    page.open(tmp_path / "r.html", "document.querySelector('.chart svg')")
    loaded = page.run("JSON.stringify(performance.getEntriesByType('navigation')[0].loadEventEnd)")
    print(
        f"\nreport of 2,000 synthetic trials: {len(text) / 1e6:.2f} MB, loaded in {float(loaded):.0f} ms"
    )
    assert page.run("document.querySelectorAll('tbody tr:not([hidden])').length") <= 80
    assert page.run("document.querySelectorAll('*').length") < 20_000
    page.wait(DONE)
    assert (
        page.run(
            "Math.max(...[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('*').length))"
        )
        < 3000
    )
    page.run("document.querySelector('details.allrows').open = true")
    page.wait("document.querySelector('details.allrows tbody td')")
    assert (
        page.run("document.querySelectorAll('details.allrows tbody tr').length") == 100
    )  # a page of 400
    assert "1 to 100 of 400" in page.run(
        "document.querySelector('details.allrows .tools').textContent"
    )
    page.run("document.querySelector('details.runs').open = true")
    page.wait("document.querySelector('details.runs tbody td')")
    assert (
        page.run("document.querySelectorAll('details.runs tbody tr').length") == 100
    )  # a page of the table
    assert "1 to 100 of 2000" in page.run(
        "document.querySelector('details.runs .tools').textContent"
    )
    assert page.complaints() == []
    page.close()


def test_the_live_page_refreshes_itself(browser, tmp_path):
    from dampen.studies.report.serve import address, make_server

    rows = {k: ROWS[k] for k in ("plain", "DropPath")}
    plan = write_study(tmp_path, rows, seeds=3)
    last = tmp_path / list(plan.runs)[-1] / "final.json"
    content = last.read_text()
    last.unlink()
    server = make_server([tmp_path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.page()
    try:
        page.open(address(server), DONE)
        assert "5 of 6 runs finished" in page.run("document.querySelector('.facts').textContent")
        last.write_text(content)
        page.wait("document.querySelector('.facts').textContent.includes('6 of 6 runs finished')")
        assert set(page.requests()) == {address(server), address(server) + "version"}
        assert page.complaints() == []
    finally:
        page.close()
        server.shutdown()
        server.server_close()


def test_the_embedded_data_is_json(report):
    text = report.read_text()
    start = text.index('<script type="application/json" id="data">') + 42
    data = json.loads(text[start : text.index("</script>", start)], parse_constant=pytest.fail)
    assert set(data["runs"]) == {"t1", "t2"}
