"""Every format of the report, its live page and its command; all runs here are synthetic."""

import csv
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dampen.studies.errors import ConfigError, LabError
from dampen.studies.report import format_of, make_report, write_report
from dampen.studies.report.charts import forest
from dampen.studies.report.figures import Palette
from dampen.studies.report.summary import advise
from dampen.studies.report.view import about_test
from dampen.studies.result import parse_diagnosis
from dampen.studies.table import diagnosed
from tests.studies.synthetic_runs import ROWS, loose, recipe, write, write_study

HOSTILE = (
    """<script>alert(1)</script><img src=x onerror="alert(2)">'"&`|_*=\\{{7*7}}</script><!--"""
)


def test_json_holds_everything_and_is_valid(study):
    content = json.loads(make_report([study]).render("json"), parse_constant=pytest.fail)
    (table,) = content["tables"]
    assert table["advice"]["pick"] == "Explicit v"
    assert table["rows"][2]["comparison"]["corrected"] < 0.05
    assert table["rows"][0]["comparison"] is None


def test_csv_can_be_read_back(study, table):
    rows = list(csv.DictReader(io.StringIO(make_report([study]).render("csv"))))
    assert [r["row"] for r in rows] == list(ROWS)
    assert float(rows[0]["mean"]) == pytest.approx(table.entries[0].summary.mean)
    assert rows[0]["difference"] == ""
    assert rows[1]["verdict"] == "inconclusive"
    assert int(rows[1]["needed_seeds"]) > 5
    assert float(rows[1]["ece_mean"]) == pytest.approx(3.8)


def test_markdown_and_latex_hold_the_table(study):
    report = make_report([study])
    text = report.render("md")
    assert "| Explicit v | 87.50 ± 0.64 | 5 | better |" in text
    assert "2,000 images instead of 50,000" in text
    latex = report.render("latex")
    assert r"\textbf{Explicit v} & \textbf{87.50 $\pm$ 0.64} & 5" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1


def test_files_are_written_in_the_format_of_their_name(study, tmp_path):
    for name in ("a.html", "a.md", "a.csv", "a.json", "a.tex"):
        write_report([study], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 500
    assert format_of(tmp_path / "x.htm") == "html"
    with pytest.raises(ConfigError, match="unknown format of 'a.docx'"):
        write_report([study], tmp_path / "a.docx")
    with pytest.raises(ConfigError, match="unknown format 'pdf'"):
        make_report([study]).render("pdf")


def hostile_study(folder):
    rows = {"plain": ROWS["plain"], HOSTILE: ROWS["DropPath"], "=cmd|'/C calc'!A0": ROWS["DropKey"]}
    return write_study(folder, rows, title=HOSTILE, name=HOSTILE, departures=(HOSTILE,))


class Tags(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def test_names_of_users_are_text_in_every_format(tmp_path):
    hostile_study(tmp_path)
    report = make_report([tmp_path])
    page = Tags()
    page.feed(report.render("html"))
    assert page.tags.count("script") == 4  # early theme, data, charts, page
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert HOSTILE in page.texts
    data = page.texts[
        max(i for i, t in enumerate(page.texts) if t.startswith("{") and '"colors"' in t)
    ]
    assert "<" not in data
    assert HOSTILE in json.dumps(json.loads(data), ensure_ascii=False).encode().decode(
        "unicode_escape"
    )
    markdown = report.render("md")
    assert "<script" not in markdown
    assert "<img" not in markdown
    rows = list(csv.DictReader(io.StringIO(report.render("csv"))))
    assert rows[1]["row"] == HOSTILE
    assert rows[2]["row"] == "'=cmd|'/C calc'!A0"
    assert json.loads(report.render("json"))["tables"][0]["rows"][1]["name"] == HOSTILE
    assert r"\{\{7*7\}\}" in report.render("latex")


def test_the_page_asks_for_nothing_outside_itself(study):
    import base64
    import hashlib

    text = make_report([study]).render("html")
    page = Tags()
    page.feed(text)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action", "data"):
            assert value.startswith(("data:", "#")), (tag, name, value)
    policy = next(v for _, n, v in page.attributes if n == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    assert len(scripts) == 3
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_every_grid_point_is_a_row_and_none_is_tested_against_a_corner(tmp_path):
    grid = {"lambda": [1e-4, 1e-3], "train.lr": [1e-4, 5e-4]}
    rows = {
        n: ([{"name": "explicit_dropout", n: "$lambda"}], 0.0, 1.0, None) for n in ("key", "value")
    }
    write_study(tmp_path, rows, grid=grid, report="all", seeds=3)
    report = make_report([tmp_path])
    (table,) = report.tables
    assert len(table.entries) == 8
    assert {e.verdict for e in table.entries} == {""}
    assert advise(table).which.headline in {
        f"{n} · lambda 0.001, lr 0.0005" for n in rows
    }  # the best corner
    assert (
        report.render("csv").count("lambda 0.001, lr 0.0005") == 4
    )  # the name and the grid of both


def test_what_was_diagnosed_stands_in_a_table_and_next_to_the_paper(tmp_path):
    plan = write_study(tmp_path, diagnose=True, departures=())
    content = json.loads((tmp_path / "plan.json").read_text())
    content["rows"][0]["published"]["pgd_accuracy"] = [12.0, 3.0]
    write(tmp_path / "plan.json", content)
    report = make_report([tmp_path])
    plain = report.tables[0].entries[0]
    first = json.loads((tmp_path / next(iter(plan.runs)) / "diagnose.json").read_text())
    strongest = max(first["robustness"], key=lambda a: a["eps"])
    assert diagnosed(parse_diagnosis(first))["pgd_accuracy"] == strongest["accuracy"]
    assert plain.metrics["pgd_accuracy"].n == 5
    assert plain.metrics["corrupted_accuracy"].mean == pytest.approx(60.0)
    assert plain.against["pgd_accuracy"].word in ("reproduced", "not reproduced")
    assert "Measured on the trained models" in report.render("html")
    assert "| Method | PGD accuracy (%) | corrupted accuracy (%) |" in report.render("md")
    assert diagnosed(parse_diagnosis({})) == {}


def test_a_published_cost_stands_next_to_the_measured_one(tmp_path):
    write_study(tmp_path, departures=())
    content = json.loads((tmp_path / "plan.json").read_text())
    dropkey = next(row for row in content["rows"] if row["name"] == "DropKey")
    dropkey["published"] |= {"cost_ratio": 1.05, "frobs": 3.0}
    write(tmp_path / "plan.json", content)
    report = make_report([tmp_path])
    entry = report.tables[0].entry("DropKey")
    ours = entry.measured("cost_ratio")
    assert ours.n == 5
    assert ours.mean == pytest.approx(
        1.05, rel=0.02
    )  # the synthetic trials cost that, give or take 1 %
    assert entry.against["cost_ratio"].word in ("reproduced", "not reproduced")
    assert entry.against["frobs"].reason == "not measured here"
    assert f"| DropKey | step cost / reference | 1.05 | {ours.mean:.3f}" in report.render("md")
    assert "step cost / reference" in report.render("html")


def test_what_a_search_tried_is_shown(tmp_path):
    write_study(tmp_path)
    axes = [{"key": "train.lr", "low": 1e-4, "high": 1e-2, "log": True, "choices": []}]
    tried = [
        {
            "values": {"train.lr": 0.001 * (i + 1)},
            "valid": 0.8 + 0.01 * i,
            "state": "complete",
            "id": str(i),
        }
        for i in range(3)
    ]
    tried.append({"values": {"train.lr": 0.01}, "valid": None, "state": "pruned", "id": "x"})
    search = {
        "metric": "accuracy",
        "mode": "max",
        "trials": 4,
        "rows": {"plain": {"axes": axes, "trials": tried}},
    }
    write(tmp_path / "search.json", search)
    page = make_report([tmp_path]).render("html")
    assert "4 per method, scored on validation; 1 unpromising ones were stopped early." in page
    (tmp_path / "search.json").write_text("{")
    assert [s.path for s in make_report([tmp_path]).skipped] == [f"{tmp_path.name}/search.json"]


def test_recipes_of_the_tests_are_called_synthetic():
    assert "Synthetic" in recipe()["title"]


# the live page


def test_the_live_page_follows_the_records_and_speaks_to_this_machine_only(tmp_path):
    import http.client
    import threading

    from dampen.studies.report.serve import HOST, make_server

    server = make_server([tmp_path])
    assert server.server_address[0] == "127.0.0.1"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path, host=None):
        connection = http.client.HTTPConnection(HOST, server.server_address[1])
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    try:
        assert "Waiting for runs" in get("/")[1]
        before = get("/version")[1]
        plan = write_study(tmp_path)
        after = get("/version")[1]
        assert after != before
        page = get("/")[1]
        assert f'data-live="{after}"' in page
        assert "connect-src 'self'" in html.unescape(page)
        trial = tmp_path / next(iter(plan.runs))
        with (trial / "log.jsonl").open("a") as log:
            log.write("\n")
        assert get("/version")[1] != after
        assert "Damaged and left out" in get("/")[1]
        assert get("/../etc/passwd")[0] == 404
        assert get("/", host="evil.example")[0] == 403
        assert get("/", host=f"localhost:{server.server_address[1]}")[0] == 200
    finally:
        server.shutdown()
        server.server_close()


def test_a_port_in_use_is_told(tmp_path):
    from dampen.studies.report.serve import make_server

    first = make_server([tmp_path])
    try:
        with pytest.raises(LabError, match="cannot be used"):
            make_server([tmp_path], first.server_address[1])
    finally:
        first.server_close()


# the command


def test_the_command_writes_prints_and_refuses(study, tmp_path, capsys):
    import typer

    from dampen.cli import main

    def call(*arguments):
        try:
            main(["report", *map(str, arguments)])
        except SystemExit as end:
            return end.code or 0
        except typer.Exit as end:
            return end.exit_code
        return 0

    assert call(study, "-o", tmp_path / "r.html") == 0
    assert "Use Explicit v" in capsys.readouterr().out
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert call(study, "--format", "csv") == 0
    assert capsys.readouterr().out.startswith("table,row,grid")
    assert call(tmp_path / "nowhere") == 1
    assert "There is no folder" in capsys.readouterr().err
    loose(tmp_path / "mixed", limit=3000)
    loose(tmp_path / "mixed", limit=400)
    assert call(tmp_path / "mixed", "--json", "-o", tmp_path / "m.html") == 2
    assert "incompatible protocols" in json.loads(capsys.readouterr().out)["error"]


def test_rows_of_several_models_have_several_references():
    """2, 4, 8 and 12 layers, each compared with its own plain row: no sentence names one of them alone."""
    results = Path(__file__).parents[3] / "reproductions" / "always_skip_attention" / "results"
    pack = results / "depth_digits-study.json.xz"
    table = make_report([pack]).tables[0]
    assert len({e.reference for e in table.entries if e.reference}) == 4
    name = "the row without methods of the same model"
    assert table.reference_name == name
    assert advise(table).which.details[0] == f"No method is significantly better than {name}."
    assert about_test(table).startswith(f"Differences to {name}, seed by seed")
    drawn = json.dumps(forest(table, Palette([e.name for e in table.entries])).panels[0].spec)
    assert f"difference to {name} in accuracy" in drawn
    eight = table.entry("8 layers, no feed-forward skip")
    eight.verdict = (
        "better"  # as if: it is better than another row than the one that most are compared with
    )
    assert advise(table).which.headline == "It depends on the model"
    assert advise(table).which.details[0] == f"Better than {name}: {eight.name}."
