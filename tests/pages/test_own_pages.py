"""The pages about one's own training, model and data do what they say: files are written, code and commands run."""

import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dampen.cli import main
from tests.studies.user_files import write_bert

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def write_files(page, folder):
    """Blocks that begin with a file's name become that file; the others are returned."""
    rest = []
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        if name:
            (folder / name[1]).write_text(block)
        else:
            rest.append(block)
    return rest


def write_data(folder):
    draw = random.Random(0)
    rows = [
        f"{' '.join(draw.choices('abcdefg', k=5))},{'yes' if i % 2 else 'no'}" for i in range(90)
    ]
    (folder / "reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    np.savez(
        folder / "arrays.npz",
        x=np.random.default_rng(0).integers(0, 255, (90, 8, 8, 3), dtype=np.uint8),
        y=np.arange(90) % 3,
    )


PAGES = [
    "own_training.md",
    "own_parts.md",
    "own/timm.md",
    "own/build.md",
    "own/finetune.md",
    "own/csv.md",
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_plan_and_take_steps(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    write_data(tmp_path)
    if "hf/my-bert" in (DOCS / page).read_text():
        write_bert(tmp_path / "my-bert")
    commands = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert commands
    for line in commands:
        name, *arguments = shlex.split(line)
        assert name == "dampen"
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--dry-run", "--threads", "1"])
        assert end.value.code == 0, capsys.readouterr()
        assert "ms a step" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (code,) = write_files("own_training.md", tmp_path)
    names = {}
    exec(compile(code, "own_training.md", "exec"), names)
    assert {row.name for row in names["study"].rows} == {
        "plain",
        "drop_key(rate=0.2)",
        "drop_key + r_drop",
        "faster",
    }
    assert (tmp_path / "report.html").exists()
    assert len(names["frame"]) == 12  # four rows, two seeds and one more
    assert "plain" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lightning_module.py", "hf_trainer.py"])
def test_the_pages_of_examples_show_them_as_they_are(name):
    """tests/test_examples.py compares them with three methods each."""
    page = {"lightning_module.py": "own/lightning.md", "hf_trainer.py": "own/hf_trainer.md"}[name]
    (shown,) = blocks(page, "python")
    assert shown == (DOCS.parent / "examples" / name).read_text()
    (command,) = blocks(page, "sh")
    assert f"examples/{name}:train" in command


def test_every_page_is_linked_and_compares_at_least_three_methods():
    from dampen.studies.configs import read_rows

    overview = (DOCS / "own_training.md").read_text()
    for page in sorted((DOCS / "own").glob("*.md")):
        assert f"own/{page.name}" in overview
        for line in (
            line for block in blocks(f"own/{page.name}", "sh") for line in block.splitlines()
        ):
            words = shlex.split(line)
            assert len(read_rows(words[words.index("--methods") + 1]).rows) >= 4, (
                line
            )  # and the plain one
