"""What a newcomer reads: the end of `dampen compare`, the help, `list`, `doctor`, and what stands without extras."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dampen.cli import PANELS, WIDEST, available, main
from dampen.cli.running import what_went_wrong
from dampen.studies.doctor import Finding, summary, to_json
from dampen.studies.report import make_report
from dampen.studies.report.settings import regularize_line, settings_text, shared_text, shorten
from dampen.studies.report.summary import QUESTIONS, advise
from tests.studies.synthetic_runs import write_study

TRAIN = """
import random
print("this line belongs in the log of the run")
def train(trial):
    bonus = trial.params.get("bonus", 0.0)
    if trial.params.get("fails"):
        raise ValueError(f"bad seed {trial.seed}")
    print("so does this one")
    return {"accuracy": 0.5 + bonus + 0.01 * random.Random(trial.seed).random()}
"""


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return "train.py:train"


ROWS = "params(bonus=0.1), params(bonus=0.0001)"


@pytest.mark.slow
def test_compare_writes_the_report_and_prints_its_path_last(capsys, script):
    """The same defaults as in Python, each answer under its question, the line to copy, the command for more seeds."""
    import inspect

    import dampen

    code, out, err = run(capsys, "compare", script, "--methods", ROWS)
    assert code == 0, err
    (folder,) = Path("runs").iterdir()
    assert out.splitlines()[-1] == f"Report: {folder / 'report.html'}"
    assert "<!doctype html>" in (folder / "report.html").read_text()
    runs = len(list(folder.glob("*/final.json")))
    assert runs == 3 * inspect.signature(dampen.compare).parameters["seeds"].default == 24
    assert all(question in out.splitlines() for question in QUESTIONS)
    after = out.splitlines()[out.splitlines().index(QUESTIONS[0]) + 1]
    assert after.startswith("  Use params(bonus=0.1).")
    assert "  # train with bonus=0.1" in out
    assert "The rule: of the methods that are significantly better" in " ".join(out.split())
    code, out, _ = run(capsys, "compare", script, "--methods", ROWS, "--no-report", "--json")
    assert code == 0
    assert '"page": null' in out


IMPORTED = ("belongs in the log",)
"""What the command itself prints once, because it imports the script to look at its function."""


@pytest.mark.slow
def test_what_workers_print_goes_to_the_log_of_the_run(tmp_path):
    """Also what a module prints on import, and what a child process prints."""
    (tmp_path / "train.py").write_text(
        TRAIN.replace("    print(", "    import os; os.system('echo from a child')\n    print(")
    )
    command = ["compare", "train.py:train", "--methods", "params(bonus=0.1)", "--seeds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "dampen", *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for words in ("belongs in the log", "so does this one", "from a child"):
        assert (done.stdout + done.stderr).count(words) == (words in IMPORTED)
        (first, *_) = tmp_path.glob("runs/*/*/output.txt")
        assert words in first.read_text()


@pytest.mark.slow
def test_an_error_of_many_runs_is_printed_once(capsys, script):
    code, out, _ = run(
        capsys, "compare", script, "--methods", "params(fails=True)", "--seeds", 4, "--workers", 1
    )
    assert code == 1
    assert len(re.findall(r"bad seed \d", out)) == 2  # while it runs, and at the end
    assert out.count("(same reason as above)") == 3
    assert "4 of 4 seeds failed (0, 1, 2, 3)" in " ".join(out.split())
    assert "Report:" in out  # of the baseline, which ran


def test_each_message_once_with_every_failed_seed_of_each_method(tmp_path):
    plan = write_study(tmp_path, seeds=8)
    from dampen.studies.engines import Outcome
    from dampen.studies.engines.runner import ComparisonResult

    told = {id: Outcome("finished", None, "") for id in plan.runs}
    labels = {label: id for id, label in plan.labels(plan.runs.values()).items()}
    for seed in (0, 1, 2, 4, 5, 7):
        told[labels[f"Blur seed {seed}"]] = Outcome("failed", None, f"{seed} is no number")
    told[labels["R-Drop seed 3"]] = Outcome("failed", None, "9 is no number")
    told[labels["R-Drop seed 6"]] = Outcome("diverged", None, "the loss is NaN")
    table = make_report([tmp_path]).tables[0]
    assert sorted(what_went_wrong(ComparisonResult(plan, tmp_path, told, table))) == [
        "R-Drop: 1 of 8 seeds failed (3); Blur: 6 of 8 seeds failed (0, 1, 2, 4, 5, 7): "
        "9 is no number",
        "R-Drop: 1 of 8 seeds failed (6): the loss is NaN",
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_answers_wrap_at_words(capsys, tmp_path, monkeypatch, width):
    """No word of an answer is cut at the edge of the terminal, at any width."""
    import io

    from rich.console import Console

    from dampen.cli.running import _print_answers

    monkeypatch.setenv("COLUMNS", str(width))
    write_study(tmp_path)
    table = make_report([tmp_path]).tables[0]
    advice = advise(table)
    screen = io.StringIO()
    console = Console(file=screen, width=width, highlight=False)
    result = type("Result", (), {"table": table})()
    _print_answers(console, result, advice, "")
    answers = screen.getvalue()[screen.getvalue().index(QUESTIONS[0]) :]
    lines = [line for line in answers.splitlines() if advice.code not in line]
    assert all(len(line) <= width for line in lines)
    words = set(answers.split())
    for part in (advice.which, advice.cost, advice.trust):
        assert set(part.headline.split()[:-1]) <= words


LONG = {
    "plain": ([], 0.0, 1.0, None),
    "explicit_dropout(value=0.05, ffn=0.05)": (
        [{"name": "explicit_dropout", "value": 0.05}],
        0.02,
        1,
        None,
    ),
    "drop_path + drop_head": ([{"name": "drop_path"}, {"name": "drop_head"}], 0.018, 1.01, None),
}


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_table_fits_and_cuts_no_number(tmp_path, width):
    """No number ends in an ellipsis; where there is room, names break at words and settings name their method."""
    import io

    from rich.console import Console

    from dampen.studies.report.terminal import results_table

    write_study(tmp_path, LONG, seeds=8)
    table = make_report([tmp_path]).tables[0]
    screen = io.StringIO()
    Console(file=screen, width=width).print(results_table(table, width=width))
    rows = screen.getvalue().splitlines()
    assert max(map(len, rows)) == width
    cells = [[c.strip() for c in row.strip("│").split("│")] for row in rows if row[0] == "│"]
    assert not any("…" in cell for row in cells for cell in row[:-1])
    for entry in table.compared():
        c = entry.comparison
        whole = ["".join(column) for column in zip(*cells, strict=True)]
        bounds = f"{c.difference:+.2f} ({c.low:+.1f} to {c.high:+.1f})"
        assert any(bounds.replace(" ", "") in text.replace(" ", "") for text in whole)
    if width == 110:
        assert "explicit_dropout(value=0.05," in [row[0] for row in cells]
        text = settings_text(table.entry("drop_path + drop_head"))
        assert text.startswith("drop_path: rate=")
        assert text.endswith("; drop_head: rate=0.1")


def test_settings_the_line_to_copy_and_the_command_for_more_seeds(tmp_path):
    import dampen

    write_study(tmp_path)
    table = make_report([tmp_path]).tables[0]
    advice = advise(table)
    assert advice.pick == "Explicit v"  # R-Drop is better by the mean, and takes twice the time
    assert advice.code == "dampen.regularize(model, dampen.ExplicitDropout(value=0.05))"
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    reg = eval(advice.code, {"dampen": dampen, "model": model})
    assert reg.methods[0].name == "explicit_dropout"
    assert settings_text(table.entry("Explicit v")) == "value=0.05"
    assert settings_text(table.entry("R-Drop")) == "weight=1.0"  # the default is said too
    table.study.header["command"] = "dampen compare --data digits --methods drop_key"
    assert advise(table).seeds == (
        "dampen compare --data digits --methods drop_key --until-decided"
        if any(e.verdict == "inconclusive" for e in table.entries)
        else ""
    )
    assert "weight=1.0" in regularize_line(table.entry("R-Drop")) or "RDrop()" in regularize_line(
        table.entry("R-Drop")
    )


def test_timing_noise_never_decides_the_recommendation(tmp_path):
    """Two equally good methods: the better mean wins unless the step times differ beyond their noise."""
    equal = {
        "plain": ([], 0.0, 1.0, None),
        "A": ([{"name": "drop_path", "rate": 0.1}], 0.0205, 1.2, None),
        "B": ([{"name": "drop_key", "rate": 0.1}], 0.0200, 1.0, None),
    }
    write_study(tmp_path / "clear", equal, seeds=8)
    table = make_report([tmp_path / "clear"]).tables[0]
    best = max(("A", "B"), key=lambda name: table.entry(name).summary.mean)
    assert table.entry("A").cost.differs
    assert advise(table).pick == "B"
    noisy = {**equal, "A": (equal["A"][0], 0.0205, 1.0, None)}
    write_study(tmp_path / "noisy", noisy, seeds=8)
    table = make_report([tmp_path / "noisy"]).tables[0]
    best = max(("A", "B"), key=lambda name: table.entry(name).summary.mean)
    assert advise(table).pick == best


def test_names_lose_what_all_share(tmp_path):
    assert shared_text(["vit + drop_key", "vit + drop_head"]) == ("vit + ", "")
    assert shared_text(["a + r_drop", "b + c + r_drop"]) == ("", " + r_drop")
    assert shared_text(["a + b", "a + b + c"]) == ("a + ", "")
    rows = {
        "plain": ([], 0.0, 1.0, None),
        "r_drop + drop_key": ([{"name": "drop_key"}], 0.01, 1.0, None),
        "r_drop + drop_path": ([{"name": "drop_path"}], 0.02, 1.0, None),
    }
    write_study(tmp_path, rows)
    short, said = shorten(make_report([tmp_path]).tables[0])
    assert [e.name for e in short.entries] == ["plain", "drop_key", "drop_path"]
    assert said == "All methods: r_drop."
    assert short.entry("drop_key").reference == "plain"


def test_help_stands_in_panels_and_is_never_wider_than_100_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    for name in ["", *available()]:
        _, out, _ = run(capsys, *([name] if name else []), "--help")
        assert max(map(len, out.splitlines())) <= WIDEST, name
    _, out, _ = run(capsys, "--help")
    assert all(f"─ {panel} ─" in out for panel in {*PANELS.values(), "Look up"})
    _, out, _ = run(capsys, "compare", "--help")
    for panel in ("What to compare", "Data and model", "How to judge", "Tuning", "Output"):
        assert f"─ {panel} ─" in out


def test_list_has_a_line_for_each_method_in_groups(capsys, monkeypatch):
    from dampen.studies.catalog import catalog

    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "list")
    lines = out.splitlines()
    for name in catalog():
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name
    assert max(map(len, lines)) <= 80
    assert "Attention" in lines
    assert "Outputs and loss" in lines


def test_an_unknown_timm_model_gets_five_suggestions():
    from dampen.studies.errors import ConfigError
    from dampen.studies.trainer.models import make_model

    with pytest.raises(ConfigError, match=r"The closest names: (\S+, ){4}\S+\.") as error:
        make_model({"name": "timm/zzz_no_such"}, {})
    assert len(str(error.value)) < 300


def test_a_budget_without_a_unit_is_refused(capsys, script):
    code, _, err = run(capsys, "compare", script, "--methods", ROWS, "--budget", "30")
    assert code == 2
    assert "30 has no unit. Write 30s, 30m or 30h." in err


def test_doctor_has_three_states_and_one_closing_sentence(capsys, tmp_path):
    fine, absent = Finding("torch", True, "2"), Finding("ray", True, "not installed", missing=True)
    wrong = Finding("disk", False, "full", "free some space")
    assert [f.state for f in (fine, absent, wrong)] == ["ok", "optional", "problem"]
    assert summary([fine]) == "Everything works."
    assert summary([fine, absent]) == "Everything that is needed works; 1 optional part is missing."
    assert summary([fine, absent, wrong]) == "1 problem to solve: disk."
    assert to_json([fine, wrong])["findings"][1]["state"] == "problem"
    _, out, _ = run(capsys, "doctor", "--data-dir", tmp_path)
    assert {line.split()[0] for line in out.splitlines()[:-1] if line[0] != " "} <= {
        "ok",
        "optional",
        "problem",
    }
    assert re.fullmatch(r"(Every|\d+ problem).*\.", out.splitlines()[-1])


def test_something_is_printed_before_torch_is_imported():
    """The line comes first on standard error; the process is ended as soon as it does."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "dampen", "doctor"], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        line = process.stderr.readline()
        process.kill()
    assert line == b"loading torch ...\n", time.monotonic() - began
    code = (
        "import sys\nimport dampen.cli as cli\n"
        "cli._load_plugins = lambda: print('torch' in sys.modules) or sys.exit()\n"
        "cli.main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert done.stderr.strip() == "loading torch ..."


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["compare", "--methods", "drop_key"], 2, "pip install 'dampen[studies]'"),
        (["--help"], 2, "dampen doctor --build"),
        (["--version"], 0, "0."),
        (["doctor", "--build"], 0, "native kernels"),
    ],
)
def test_without_extras_the_command_says_what_to_install(tmp_path, arguments, code, words):
    """In a process that cannot import what the extra brings; nothing is built but on request."""
    block = (
        "import sys\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "blocked = ('typer', 'rich', 'msgspec', 'scipy')\n"
        "importlib.util.find_spec = lambda n, *a: None if n in blocked else real(n, *a)\n"
        "for name in blocked: sys.modules[name] = None\n"
        "from dampen.cli import main\n"
        f"main({arguments!r})"
    )
    environment = {**os.environ, "DAMPEN_CACHE": str(tmp_path), "DAMPEN_NATIVE": "0"}
    if "--build" in arguments:
        environment.pop("DAMPEN_NATIVE")
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert bool(list(tmp_path.glob("**/native-*.so"))) == ("--build" in arguments)
