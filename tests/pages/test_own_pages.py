"""The pages about one's own training, model and data do what they say: files are written, code and commands run."""

import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dampen.cli import main

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
    rows = [f"{' '.join(draw.choices('abcdefg', k=5))},{'yes' if i % 2 else 'no'}" for i in range(90)]
    (folder / "reviews.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    np.savez(
        folder / "arrays.npz",
        x=np.random.default_rng(0).integers(0, 255, (90, 8, 8, 3), dtype=np.uint8),
        y=np.arange(90) % 3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own_training.md", "own_parts.md"])
def test_commands_of_the_page_plan_and_take_steps(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    write_data(tmp_path)
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
    assert {row.name for row in names["study"].rows} == {"plain", "drop_key(rate=0.2)", "drop_key + r_drop", "faster"}
    assert (tmp_path / "report.html").exists()
    assert len(names["frame"]) == 12  # four rows, two seeds and one more
    assert "plain" in capsys.readouterr().out
