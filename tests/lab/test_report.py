"""From run folders to tables, verdicts and formats; all runs here are synthetic."""

import csv
import html
import io
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from dampen.lab.errors import ConfigError, LabError
from dampen.lab.report import format_of, make_report, write_report
from dampen.lab.report.advice import advise
from dampen.lab.report.protocol import ProtocolMismatch
from dampen.lab.report.table import diagnosed
from dampen.lab.trial import Trial
from tests.lab.synthetic_runs import ROWS, recipe, write, write_study, write_trial

HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">'"&`|_*=\\{{7*7}}</script><!--"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def table(study):
    return make_report([study]).tables[0]


def loose(folder, count=3, limit=3000, methods=(), gain=0.0, **train):
    for seed in range(count):
        content = {
            "data": {"name": "cifar10", "limit": limit},
            "model": {"name": "vit"},
            "methods": list(methods),
            "train": train,
            "seed": seed,
        }
        trial = Trial.from_dict(content)
        write_trial(folder / trial.id, trial, gain, 1.0, seed)


def edit(path, **changes):
    write(path, json.loads(path.read_text()) | changes)


# --- reading


def test_damaged_and_empty_folders_are_listed_with_the_reason_and_skipped(tmp_path):
    plan = write_study(tmp_path / "s")
    ids = list(plan.trials)
    folders = [tmp_path / "s" / i for i in ids]
    text = (folders[0] / "final.json").read_text()
    (folders[0] / "final.json").write_text(text[: len(text) // 2])
    (folders[1] / "config.json").unlink()
    edit(folders[2] / "final.json", id="another")
    (folders[3] / "config.json").write_text("[]")
    content = json.loads((folders[4] / "final.json").read_text())
    del content["test"]
    write(folders[4] / "final.json", content)
    (tmp_path / "s" / "empty").mkdir()
    write_trial(
        tmp_path / "s" / "stranger", Trial.from_dict({"data": {"name": "digits"}, "model": {"name": "vit"}}), 0, 1, 0
    )
    report = make_report([tmp_path])
    reasons = {s.path.split("/")[-1]: s.reason for s in report.skipped}
    assert "damaged" in reasons[ids[0]]
    assert "final.json" in reasons[ids[0]]
    assert "no config.json" in reasons[ids[1]]
    assert "belongs to trial another" in reasons[ids[2]]
    assert "damaged" in reasons[ids[3]]
    assert "final.json has no test" in reasons[ids[4]]
    assert reasons["empty"] == "empty folder"
    assert "no row of plan.json" in reasons["stranger"]
    assert not any(str(tmp_path) in s.reason for s in report.skipped)  # pages are passed on
    (table,) = report.tables
    assert sum(e.summary.n for e in table.entries) == 25
    assert "5 of 30 planned runs not finished." in advise(table).trust.details


def test_a_damaged_plan_is_listed_and_its_trials_still_make_a_table(tmp_path):
    write_study(tmp_path / "s")
    (tmp_path / "s" / "plan.json").write_text('{"rows": [')
    report = make_report([tmp_path / "s"])
    assert [s.path for s in report.skipped] == ["s/plan.json"]
    assert {"plain", "drop_key(rate=0.3)"} <= {e.name for e in report.tables[0].entries}


def test_nothing_to_report_says_what_was_found_and_what_to_do(tmp_path):
    with pytest.raises(LabError, match="There is no folder"):
        make_report([tmp_path / "nowhere"])
    (tmp_path / "a").mkdir()
    with pytest.raises(LabError, match=r"a: empty folder(.|\n)*dampen demo"):
        make_report([tmp_path])


def test_unfinished_and_diverged_runs_are_counted_and_not_averaged(tmp_path):
    plan = write_study(tmp_path)
    plain, dropkey = (tmp_path / plan.rows[i].points[0].trials[seed] for i, seed in ((0, "0"), (1, "1")))
    (plain / "final.json").unlink()
    edit(dropkey / "final.json", status="diverged", reason="Training stopped at step 3.", test={}, valid={})
    (table,) = make_report([tmp_path]).tables
    one, two = table.entries[:2]
    assert (one.summary.n, one.unfinished, one.diverged) == (4, 1, 0)
    assert (two.summary.n, two.unfinished, two.diverged) == (4, 0, 1)
    assert two.comparison.n == 3  # seeds that both have
    assert "1 run diverged and is not in the means." in advise(table).trust.details


def test_trials_in_a_shared_store_serve_two_plans(tmp_path):
    write_study(tmp_path / "a", name="a")
    shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("[0-9a-f]*[0-9a-f]"))
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["plan.json"]
    report = make_report([tmp_path])
    assert [sum(e.summary.n for e in t.entries) for t in report.tables] == [30, 30]
    assert not report.skipped


def test_a_damaged_log_costs_its_curve_and_nothing_else(tmp_path):
    plan = write_study(tmp_path)
    trial = tmp_path / next(iter(plan.trials))
    (trial / "log.jsonl").write_text('{"epoch": 1, "step"\n')
    report = make_report([tmp_path])
    assert report.tables[0].entries[0].summary.n == 5
    assert f"Damaged and left out: the log of {trial.name}." in report.render("html")


# --- one protocol per table


def test_mixing_protocols_is_refused_with_every_difference(tmp_path):
    loose(tmp_path, limit=3000)
    loose(tmp_path, limit=5000, methods=[{"name": "drop_key", "rate": 0.3}], epochs=7)
    with pytest.raises(ProtocolMismatch) as caught:
        make_report([tmp_path])
    assert caught.value.exit_code == 2
    assert "data.limit: 3000 in 3 runs, 5000 in 3 runs" in str(caught.value)
    assert "train.epochs: 20 in 3 runs, 7 in 3 runs" in str(caught.value)
    assert "--split" in str(caught.value)
    assert len(make_report([tmp_path], split=True).tables) == 2


def test_learning_rates_and_seeds_may_differ(tmp_path):
    loose(tmp_path, lr=1e-3)
    loose(tmp_path, lr=5e-3)
    (table,) = make_report([tmp_path]).tables
    assert len(table.entries) == 1
    assert sorted(c.grid["train.lr"] for c in table.entries[0].row.cells) == [0.001, 0.005]


def test_a_plan_that_mixes_data_is_refused(tmp_path):
    plan = write_study(tmp_path)
    other = tmp_path / next(iter(plan.rows[1].points[0].trials.values()))
    edit(other / "config.json", data={"name": "cifar100", "limit": 3000})
    with pytest.raises(ProtocolMismatch, match=r"data\.name: cifar10 in 29 runs, cifar100 in 1 run\n"):
        make_report([tmp_path])


def test_splits_of_another_size_are_another_protocol(tmp_path):
    plan = write_study(tmp_path)
    other = tmp_path / next(iter(plan.rows[1].points[0].trials.values()))
    edit(other / "final.json", data={"examples": {"train": 50, "valid": 900, "test": 1000}})
    with pytest.raises(ProtocolMismatch, match=r"examples\.train: 2100 in 29 runs, 50 in 1 run"):
        make_report([tmp_path])


def test_rows_with_another_model_are_compared_among_themselves(tmp_path):
    plan = write_study(tmp_path)
    for row in plan.rows[3:]:
        for trial in row.points[0].trials.values():
            edit(tmp_path / trial / "config.json", model={"name": "convmixer"})
    (table,) = make_report([tmp_path]).tables
    assert [e.reference for e in table.entries] == [None, "plain", "plain", None, "Explicit v", "Explicit v"]


# --- judging


def test_rows_without_a_run_are_shown_as_such(tmp_path):
    plan = write_study(tmp_path)
    for trial in plan.rows[1].points[0].trials.values():
        shutil.rmtree(tmp_path / trial)
    report = make_report([tmp_path])
    assert report.tables[0].entries[1].verdict == "no run yet"
    for name in ("html", "md", "csv", "json", "latex"):
        assert "no run yet" in report.render(name)


def test_one_seed_makes_a_page_without_intervals(tmp_path):
    write_study(tmp_path, seeds=1)
    report = make_report([tmp_path])
    assert {e.verdict for e in report.tables[0].entries} == {"reference", "too few runs"}
    assert "Too few runs to say" in report.render("html")


def test_verdicts_costs_and_the_paper(table):
    by_name = {e.name: e for e in table.entries}
    assert {n: e.verdict for n, e in by_name.items()} == {
        "plain": "reference",
        "DropKey": "no difference shown",
        "DropPath": "better",
        "Explicit v": "better",
        "R-Drop": "better",
        "Blur": "worse",
    }
    assert by_name["R-Drop"].cost.ratio == pytest.approx(1.94, abs=0.03)
    assert by_name["plain"].cost.ratio == 1.0
    assert by_name["Explicit v"].against["accuracy"].word == "not comparable"
    assert by_name["Explicit v"].claim.endswith("same direction")
    assert by_name["DropKey"].claim.endswith("not shown here")
    assert by_name["plain"].summary.mean == pytest.approx(sum(by_name["plain"].values.values()) / 5)
    assert 80 < by_name["plain"].summary.mean < 90  # percent


def test_without_departures_the_paper_is_judged(tmp_path):
    write_study(tmp_path, departures=())
    (table,) = make_report([tmp_path]).tables
    words = {e.name: e.against["accuracy"].word for e in table.entries if e.against}
    assert words["plain"] == "reproduced"
    assert set(words.values()) <= {"reproduced", "not reproduced", "not comparable"}


def test_the_grid_point_is_chosen_on_validation(tmp_path):
    plan = write_study(tmp_path, grid={"lambda": [0.05, 0.1]})
    row = next(r for r in plan.rows if r.name == "Explicit v")
    first, second = row.points
    for seed in first.trials:
        for point, valid, test in ((first, 0.9, 0.1), (second, 0.8, 0.99)):
            path = tmp_path / point.trials[seed] / "final.json"
            content = json.loads(path.read_text())
            content["valid"]["accuracy"], content["test"]["accuracy"] = valid, test
            write(path, content)
    (table,) = make_report([tmp_path]).tables
    assert table.entry("Explicit v").cell.grid == {"lambda": 0.05}
    assert table.entry("Explicit v").summary.mean == pytest.approx(10.0)


def test_costs_of_different_machines_are_not_compared(tmp_path):
    plan = write_study(tmp_path)
    for trial in plan.rows[1].points[0].trials.values():
        path = tmp_path / trial / "environment.json"
        session = json.loads(path.read_text())["sessions"][0]
        write(path, {"sessions": [session | {"threads": 8}]})
    (table,) = make_report([tmp_path]).tables
    assert table.entries[1].cost.ratio is None
    assert table.entries[2].cost.ratio is not None
    assert "Runs come from 2 different machines or thread counts." in advise(table).trust.details


def test_advice_takes_the_cheapest_of_the_best(table):
    advice = advise(table)
    assert advice.pick == "Explicit v"  # R-Drop is not shown better and costs nearly twice as much
    assert advice.which.headline == "Use Explicit v"
    assert advice.trust.headline == "Well founded: 5 seeds"


@pytest.mark.parametrize(
    ("rows", "seeds", "headline", "trust"),
    [
        ({k: ROWS[k] for k in ("plain", "DropKey")}, 5, "Stay with plain", "Well founded: 5 seeds"),
        (ROWS, 2, "Too few runs to say", "Little: too few seeds"),
        ({k: ROWS[k] for k in ("plain", "Blur")}, 3, "Stay with plain", "Some: 3 seeds"),
    ],
)
def test_advice_when_nothing_is_better(tmp_path, rows, seeds, headline, trust):
    write_study(tmp_path, rows, seeds=seeds)
    advice = advise(make_report([tmp_path]).tables[0])
    assert (advice.which.headline, advice.trust.headline, advice.pick) == (headline, trust, None)


def test_lower_is_better_for_some_metrics(tmp_path):
    plan = write_study(tmp_path)
    edit(tmp_path / "plan.json", header=plan.header | {"metric": "nll"})
    (table,) = make_report([tmp_path]).tables
    assert table.study.mode == "min"
    assert table.ranked()[0].name == "R-Drop"
    # invented nll are the same for every seed, so that no spread exists: five equal differences are not significant
    assert table.entry("R-Drop").verdict == "no difference shown"


# --- formats


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
    assert rows[1]["verdict"] == "no difference shown"
    assert float(rows[1]["ece_mean"]) == pytest.approx(3.8)


def test_markdown_and_latex_hold_the_table(study):
    report = make_report([study])
    text = report.render("md")
    assert "| Explicit v | 87.50 ± 0.64 | 5 |" in text
    assert "2,000 images instead of 50,000" in text
    latex = report.render("latex")
    assert r"\textbf{Explicit v} & \textbf{87.50 $\pm$ 0.64} & 5" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1


def test_files_are_written_in_the_format_of_their_name(study, tmp_path):
    for name in ("a.html", "a.md", "a.csv", "a.json", "a.tex"):
        write_report([study], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 500
    assert format_of(tmp_path / "x.htm") == "html"
    with pytest.raises(ConfigError, match="cannot tell the format of 'a.docx'"):
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
    data = page.texts[max(i for i, t in enumerate(page.texts) if t.startswith('{"colors"'))]
    assert "<" not in data
    assert HOSTILE in json.dumps(json.loads(data), ensure_ascii=False).encode().decode("unicode_escape")
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


def test_a_grid_has_its_matrix_in_the_page_and_no_tests_against_a_corner(tmp_path):
    grid = {"lambda": [1e-4, 1e-3], "train.lr": [1e-4, 5e-4]}
    rows = {n: ([{"name": "explicit_dropout", n: "$lambda"}], 0.0, 1.0, None) for n in ("key", "value")}
    write_study(tmp_path, rows, grid=grid, report="all", seeds=3)
    report = make_report([tmp_path])
    (table,) = report.tables
    assert len(table.entries) == 8
    assert {e.verdict for e in table.entries} == {""}
    assert advise(table).which.headline in {f"{n} · lambda 0.001, lr 0.0005" for n in rows}  # the best corner
    assert "lambda x lr" in report.render("html")
    markdown = report.render("md")
    assert "| lambda \\\\ lr | 0.0001 | 0.0005 |" in markdown.replace("\\ ", "\\\\ ")
    assert markdown.count("| 0.001 | ") == 2
    assert len(re.findall(r"\*\*\d\d\.\d\d ± ", markdown)) == 2  # the chosen point of each row


def test_what_was_diagnosed_stands_in_a_table_and_next_to_the_paper(tmp_path):
    plan = write_study(tmp_path, diagnose=True, departures=())
    content = json.loads((tmp_path / "plan.json").read_text())
    content["rows"][0]["published"]["pgd_accuracy"] = [12.0, 3.0]
    write(tmp_path / "plan.json", content)
    report = make_report([tmp_path])
    plain = report.tables[0].entries[0]
    first = json.loads((tmp_path / next(iter(plan.trials)) / "diagnose.json").read_text())
    strongest = max(first["robustness"], key=lambda a: a["eps"])
    assert diagnosed(first)["pgd_accuracy"] == strongest["accuracy"]
    assert plain.metrics["pgd_accuracy"].n == 5
    assert plain.metrics["corrupted_accuracy"].mean == pytest.approx(60.0)
    assert plain.against["pgd_accuracy"].word in ("reproduced", "not reproduced")
    assert "Measured on the trained models" in report.render("html")
    assert "| Row | PGD accuracy (%) | corrupted accuracy (%) |" in report.render("md")
    assert diagnosed({}) == {}


def test_what_a_search_tried_is_shown(tmp_path):
    write_study(tmp_path)
    axes = [{"key": "train.lr", "low": 1e-4, "high": 1e-2, "log": True, "choices": []}]
    tried = [
        {"values": {"train.lr": 0.001 * (i + 1)}, "valid": 0.8 + 0.01 * i, "state": "complete", "id": str(i)}
        for i in range(3)
    ]
    tried.append({"values": {"train.lr": 0.01}, "valid": None, "state": "pruned", "id": "x"})
    search = {"metric": "accuracy", "mode": "max", "trials": 4, "rows": {"plain": {"axes": axes, "trials": tried}}}
    write(tmp_path / "search.json", search)
    page = make_report([tmp_path]).render("html")
    assert "4 per row, scored on validation; 1 hopeless ones were cut short." in page
    (tmp_path / "search.json").write_text("{")
    assert [s.path for s in make_report([tmp_path]).skipped] == [f"{tmp_path.name}/search.json"]


def test_recipes_of_the_tests_are_called_synthetic():
    assert "Synthetic" in recipe()["title"]


# --- the live page


def test_the_live_page_follows_the_records_and_speaks_to_this_machine_only(tmp_path):
    import http.client
    import threading

    from dampen.lab.report.serve import HOST, make_server

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
        trial = tmp_path / next(iter(plan.trials))
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
    from dampen.lab.report.serve import make_server

    first = make_server([tmp_path])
    try:
        with pytest.raises(LabError, match="cannot be used"):
            make_server([tmp_path], first.server_address[1])
    finally:
        first.server_close()


# --- the command


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
