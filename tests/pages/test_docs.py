"""What is generated is up to date, and the site builds."""

from pathlib import Path

import pytest

from benchmarks.method_cards import main, markdown, pages

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_every_method_has_a_card():
    from dampen.registry import methods

    names = {path.stem for path in pages() if path.parent.parent.name == "docs"}
    assert names == {*methods(), "index"}


def test_markdown_closes_its_blocks():
    text = markdown("Do it.\n\nArgs:\n    rate: how much\n\n>>> 1 + 1\n2")
    assert text.count("```") == 2
    assert "- `rate`: how much" in text


@pytest.mark.slow
def test_site_builds(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
